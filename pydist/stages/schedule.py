"""Schedules: the order in which ranks run the passes of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from pydist.errors import UsageError


class Pass(NamedTuple):
    """Pass that a micro-batch makes through one stage.

    Of a schedule with "weight" passes, backward passes leave gradients of weights to them.
    """

    kind: Literal["forward", "backward", "weight"]
    stage: int
    micro_batch: int

    def label(self, group: int) -> str:
        """Names the pass in a profile, for a sample group."""
        return f"{self.kind} {self.micro_batch}, stage {self.stage}, group {group}"


Passes = list[list[Pass]]
"""The passes of a batch on each mesh, in order."""


def gpipe(order: Sequence[int], micro_batches: int) -> Passes:
    """Runs all forward passes, then all backward passes, stage by stage.

    Source: Huang et al., GPipe (NeurIPS 2019). Idle are S - 1 of M + S - 1 passes; all M
    micro-batches are in memory.
    """
    numbers, found = range(micro_batches), _empty(order)
    for stage, mesh in enumerate(order):
        found[mesh] += [Pass("forward", stage, m) for m in numbers]
    for stage, mesh in reversed([*enumerate(order)]):
        found[mesh] += [Pass("backward", stage, m) for m in numbers]
    return found


def one_f_one_b(order: Sequence[int], micro_batches: int) -> Passes:
    """Runs a backward and a forward pass in turn, after as many forward passes as needed for it.

    With a stage on each mesh, it takes as long as GPipe, and keeps at most S - stage micro-batches
    in memory. If meshes have stages in turn (0, 1, 0, 1), it is the interleaved schedule: of each
    mesh's time for M micro-batches in V stages, (S - 1) / (V M) is idle if S divides M.

    Sources: Narayanan et al., PipeDream (SOSP 2019), with a flush after each step; Narayanan et
    al., Megatron-LM (SC 2021).
    """
    meshes = max(order) + 1
    rounds = len(order) // meshes
    if tuple(order) != tuple(range(meshes)) * rounds:
        return _by_simulation(order, micro_batches)
    found = _empty(order)
    # For whole blocks of micro-batches; an order without the passes of some is an order still.
    blocks = range(0, micro_batches, meshes)
    for mesh in range(meshes):
        mine = range(mesh, len(order), meshes)
        ahead = [Pass("forward", s, m) for b in blocks for s in mine for m in range(b, b + meshes)]
        back = [
            Pass("backward", s, m) for b in blocks for s in reversed(mine)
            for m in range(b, b + meshes)
        ]  # fmt: skip
        first = meshes - mesh - 1
        if rounds > 1:
            first = min(len(ahead), 2 * first + (rounds - 1) * meshes)
        passes = ahead[:first]
        for i, each in enumerate(back):
            passes += [*ahead[first + i : first + i + 1], each]
        found[mesh] = [each for each in passes if each.micro_batch < micro_batches]
    return found


def gems(order: Sequence[int], micro_batches: int) -> Passes:
    """Runs one micro-batch after the other, through the meshes in turn back and forth.

    The forward pass of a micro-batch follows the backward pass of the one before over the meshes,
    and so needs no memory beside it. Each mesh trains two stages; gradients are summed over both
    meshes of a stage. n micro-batches take n S (F + B) - (n - 1) (S - 1) F.

    Source: Jain et al., GEMS (SC 2020): MAST, and MASTER with several pairs of micro-batches.
    """
    found = _empty(order)
    for m in range(micro_batches):
        for stage, mesh in enumerate(_placed(order, m, returns=True)):
            found[mesh] += [Pass("forward", stage, m), Pass("backward", stage, m)]
    return found


def zero_bubble(order: Sequence[int], micro_batches: int) -> Passes:
    """Fills with gradients of weights the time in which a mesh would wait.

    A mesh keeps, on average over its stages, as many micro-batches as there are meshes, S. If all
    passes take equal times and the stages are in a V (0, 1, 1, 0), a mesh is idle only until its
    first pass can begin, for S - 1 of 6 M + S - 1 passes. With one stage on each mesh it is idle
    for up to 2 (S - 1) of 3 M + 2 (S - 1), which are twice as long.

    Sources: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024); Qi et al., Pipeline
    Parallelism with Controllable Memory (NeurIPS 2024).
    """
    return _by_simulation(order, micro_batches, splits=True)


SCHEDULES: dict[str, Callable[[Sequence[int], int], Passes]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "gems": gems,
    "zero-bubble": zero_bubble,
}
"""Schedules by name; called with the mesh of each stage and the number of micro-batches."""


class Schedule:
    """Schedule that orders the passes of all stages on their meshes.

    Args:
        name: of the schedule.
        order: the mesh of each stage.

    Raises:
        UsageError: it does not exist, or not for this order.
    """

    def __init__(self, name: str, order: Sequence[int]) -> None:
        if name not in SCHEDULES:
            raise UsageError(f"schedule={name!r}; possible are {', '.join(SCHEDULES)}")
        if name == "gems" and tuple(order) != tuple(range(len(order))):
            raise UsageError(
                f"schedule='gems' with stages on meshes {list(order)}: each mesh must have one "
                "stage, as micro-batches go through them back and forth"
            )
        self.name, self.order = name, tuple(order)

    @property
    def returns(self) -> bool:
        """Whether every second micro-batch goes through the meshes from the last to the first."""
        return self.name == "gems"

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are computed in passes of their own."""
        return self.name == "zero-bubble"

    def placed(self, micro_batch: int) -> Sequence[int]:
        """Returns the mesh of each stage for a micro-batch."""
        return _placed(self.order, micro_batch, returns=self.returns)

    def meshes(self, stage: int) -> set[int]:
        """Returns the meshes that run a stage."""
        return {self.placed(m)[stage] for m in range(2)}

    def passes(self, micro_batches: int) -> Passes:
        """Returns the passes of each mesh."""
        return SCHEDULES[self.name](self.order, micro_batches)

    def most_alive(self, stage: int, micro_batches: int) -> int:
        """Returns the most micro-batches of a stage that wait for their last pass."""
        return max(most_alive(own, stage) for own in self.passes(micro_batches))


def most_alive(passes: Sequence[Pass], stage: int | None = None) -> int:
    """Returns the most forward passes, of one stage or of all, that wait for their last pass."""
    last = "weight" if any(each.kind == "weight" for each in passes) else "backward"
    alive = most = 0
    for each in passes:
        if stage in (None, each.stage):
            alive += (each.kind == "forward") - (each.kind == last)
            most = max(most, alive)
    return most


def needed_passes(each: Pass, stages: int) -> list[Pass]:
    """Returns the passes that must come before a pass, in a network of some stages."""
    if each.kind == "forward":
        return [each._replace(stage=each.stage - 1)] if each.stage else []
    if each.kind == "weight":
        return [each._replace(kind="backward")]
    ahead = each._replace(kind="forward")
    return [ahead] if each.stage == stages - 1 else [ahead, each._replace(stage=each.stage + 1)]


_RANKS = {"backward": 0, "forward": 1, "weight": 2}
"""The kind that a mesh begins with, of passes that could begin at the same time."""


def _by_simulation(order: Sequence[int], micro_batches: int, *, splits: bool = False) -> Passes:
    """Returns the order in which meshes begin passes as soon as they can, backward ones first.

    A backward pass is taken to last twice as long as a forward pass. At most S - stage
    micro-batches of a stage wait for their backward pass.

    Args:
        order: the mesh of each stage.
        micro_batches: their number.
        splits: whether the second half of a backward pass is a pass of its own, which nothing waits
            for. At most as many micro-batches wait for it, on average over the stages of a mesh, as
            there are meshes; more if the order would wait for itself.
    """
    stages, found = len(order), _empty(order)
    free, done = [0.0] * len(found), dict[Pass, float]()
    lasts = {"forward": 1, "backward": 1, "weight": 1} if splits else {"forward": 1, "backward": 2}
    last = "weight" if splits else "backward"
    count = {kind: [0] * stages for kind in lasts}  # passes of each stage so far

    def may_begin(stage: int) -> bool:
        """Returns whether a stage may keep another micro-batch."""
        if not splits:
            return count["forward"][stage] < count["backward"][stage] + stages - stage
        own = [each for each, mesh in enumerate(order) if mesh == order[stage]]
        kept = sum(count["forward"][each] - count["weight"][each] for each in own)
        return kept < len(own) * len(found)

    def possible(limited: bool) -> Iterator[tuple[float, int, int, Pass]]:
        """Yields the passes that can begin next, the best one least."""
        for stage, mesh in enumerate(order):
            candidates = []
            if count["forward"][stage] < micro_batches and (may_begin(stage) or not limited):
                candidates.append(Pass("forward", stage, count["forward"][stage]))
            if count["backward"][stage] < count["forward"][stage]:
                candidates.append(Pass("backward", stage, count["backward"][stage]))
            if splits and count["weight"][stage] < count["backward"][stage]:
                candidates.append(Pass("weight", stage, count["weight"][stage]))
            for each in candidates:
                needed = needed_passes(each, stages)
                if all(n in done for n in needed):
                    start = max([free[mesh], *(done[n] for n in needed)])
                    # Of forward passes the latest stage, of others the earliest one.
                    towards = -stage if each.kind == "forward" else stage
                    yield start, _RANKS[each.kind], towards, each

    while min(count[last]) < micro_batches:
        # A mesh may have filled its memory by early stages, while a later one of its must begin.
        best = min(possible(limited=True), default=None) or min(possible(limited=False))
        start, _, _, each = best
        mesh = order[each.stage]
        done[each] = free[mesh] = start + lasts[each.kind]
        count[each.kind][each.stage] += 1
        found[mesh].append(each)
    return found


def _placed(order: Sequence[int], micro_batch: int, *, returns: bool) -> Sequence[int]:
    return order[::-1] if returns and micro_batch % 2 else order


def _empty(order: Sequence[int]) -> Passes:
    return [[] for _ in range(max(order) + 1)]
