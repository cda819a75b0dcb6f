"""The plan of stages: where a recorded forward pass is cut, by time or memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from pydist.errors import UsageError
from pydist.stages.balance import PartCosts, partition
from pydist.stages.calls import Key
from pydist.stages.messages import Route
from pydist.stages.part_memory import PartMemory
from pydist.stages.record import RecordedPass
from pydist.stages.schedule import Schedule
from pydist.stages.uses import Uses


@dataclass
class StagePlan:
    """Plan that says where the stages of a network begin.

    Attributes:
        starts: the first call of each stage but the first.
        rows: of the table of `str(plan)`: calls, milliseconds, MiB that a rank needs in memory for
            one micro-batch, MiB received.
    """

    starts: list[Key]
    rows: list[tuple[int, float, float, float]] = field(default_factory=list)

    def uses(self, found: RecordedPass, model: nn.Module, schedule: Schedule) -> Uses:
        """Returns which meshes use each parameter and buffer, by a recorded pass.

        Args:
            found: the recorded pass.
            model: the network.
            schedule: says which mesh runs each stage.
        """
        uses = Uses(model)
        for cost, operands, stage in zip(
            found.costs, found.operands, self._stages_of(found), strict=True
        ):
            uses.note(cost.key, operands, stage, schedule.meshes(stage))
        return uses

    def routes(self, found: RecordedPass, schedule: Schedule, *, relays: bool) -> set[Route]:
        """Returns the routes that tensors take between stages, by a recorded pass.

        Args:
            found: the recorded pass.
            schedule: says which mesh runs each stage.
            relays: whether a tensor goes through all stages between two.
        """
        stages = [*self._stages_of(found), len(self.starts)]
        routes = set[Route]()
        for made, use in found.flows:
            source, target = stages[made], stages[use]
            hops = range(source, target + 1) if relays else sorted({source, target})
            for a, b in pairwise(hops):
                placed = map(schedule.placed, range(2))
                routes |= {Route(a, b, meshes[a], meshes[b]) for meshes in placed}
        return routes

    def _stages_of(self, found: RecordedPass) -> Iterator[int]:
        """Yields the stage of each call of a recorded pass."""
        stage = 0
        for cost in found.costs:
            if stage < len(self.starts) and cost.key == self.starts[stage]:
                stage += 1
            yield stage

    def __str__(self) -> str:
        head = ("stage", "calls", "time", "memory", "receives", "begins with")
        total = sum(row[1] for row in self.rows) or 1.0
        lines = [head]
        for stage, (calls, ms, needed, received) in enumerate(self.rows):
            begin = str(self.starts[stage - 1]) if stage else "the input"
            numbers = f"{ms / total:.0%}", f"{needed:.1f} MiB", f"{received:.1f} MiB"
            lines.append((str(stage), str(calls), *numbers, begin))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        return "\n".join(
            "  ".join([*(c.rjust(w) for c, w in zip(line, widths, strict=False)), line[-1]])
            for line in lines
        )


BALANCES = ("time", "memory")


def make_plan(
    found: RecordedPass,
    ranks: Sequence[int],
    balance: str = "time",
    cuts: Sequence[str] | None = None,
    alive: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    state: float = 0.0,
) -> StagePlan:
    """Cuts a recorded forward pass into stages.

    Args:
        found: the pass.
        ranks: that each stage has for a sample; they divide its time, and the memory of tensors.
        balance: what the largest mesh has least of: "time", or "memory": what its micro-batches
            keep for their backward passes, what one of these needs besides, and what stays of its
            parameters; see `PartMemory`.
        cuts: paths of modules whose first calls begin the stages from the second on; overrides
            `balance`.
        alive: the micro-batches that each stage keeps at once; by default one.
        order: the mesh of each stage; by default one stage on each.
        state: bytes of gradients and optimizer state for each byte of parameters.

    Returns:
        The plan: the best cuts; see `pydist.stages.balance.partition`.

    Raises:
        UsageError: there are fewer calls than stages, or a cut is none of the network.
    """
    if balance not in BALANCES:
        raise UsageError(f"balance={balance!r}; possible are {', '.join(BALANCES)}")
    alive = alive or [1] * len(ranks)
    frees = max(ranks) == 1
    memory = {n: PartMemory(found, n, state=state, frees=frees) for n in set(ranks)}
    if cuts is None:
        seconds = [cost.seconds for cost in found.costs]
        costs = [
            times(seconds, n) if balance == "time" else memories(memory[n], kept)
            for n, kept in zip(ranks, alive, strict=True)
        ]
        at = _balanced(found, costs, order or range(len(ranks)))
    else:
        at = _at_modules(found, cuts, len(ranks))
    rows = []
    starts = [0, *at]
    for stage, (a, b) in enumerate(pairwise([*starts, len(found.costs)])):
        ms = 1e3 * sum(c.seconds for c in found.costs[a:b])
        _, most = memory[ranks[stage]].columns(starts)[stage]
        mib = float(most[-1]) / 2**20
        rows.append((b - a, ms, mib, float(found.sent[a]) / 2**20 if a else 0.0))
    return StagePlan([found.costs[i].key for i in at], rows)


def _at_modules(found: RecordedPass, cuts: Sequence[str], stages: int) -> list[int]:
    if len(cuts) != stages - 1:
        raise UsageError(f"cuts={list(cuts)}: {stages} stages have {stages - 1} cuts")
    at: list[int] = []
    for cut in cuts:
        after = at[-1] + 1 if at else 1
        calls = range(after, len(found.costs))
        paths = (found.costs[i].key.module for i in calls)
        i = next(
            (i for i, p in zip(calls, paths, strict=True) if f"{p}.".startswith(f"{cut}.")), None
        )
        if i is None:
            raise UsageError(
                f"cuts={list(cuts)}: module {cut!r} makes no call after the stage before it begins"
            )
        if found.inside[i]:
            raise UsageError(
                f"cuts={list(cuts)}: module {cut!r} is within a part under torch.utils.checkpoint, "
                "which one stage must repeat as a whole"
            )
        at.append(i)
    return at


def times(seconds: Sequence[float] | np.ndarray, ranks: int) -> PartCosts:
    """Returns the seconds of parts of a pass on a stage of some ranks for a sample.

    Args:
        seconds: of each call.
        ranks: of the stage, for a sample.
    """
    ends = np.concatenate([[0.0], np.cumsum(seconds)])

    def columns(starts: Sequence[int]) -> Iterator[np.ndarray]:
        first = np.asarray(starts)
        for j, stop in enumerate([*starts[1:], len(seconds)]):
            yield (ends[stop] - ends[first[: j + 1]]) / ranks

    return columns


def memories(memory: PartMemory, alive: int = 1) -> PartCosts:
    """Returns the bytes that parts of a pass need on each rank of a stage.

    Args:
        memory: of the parts of the pass, on the stage's ranks.
        alive: micro-batches whose saved tensors are kept. The backward pass of one runs at a time.
    """

    def columns(starts: Sequence[int]) -> Iterator[np.ndarray]:
        for saved, most in memory.columns(starts):
            yield (alive - 1) * saved + most

    return columns


def _balanced(found: RecordedPass, costs: Sequence[PartCosts], order: Sequence[int]) -> list[int]:
    if 1 + int(found.legal.sum()) < len(costs):
        raise UsageError(
            f"{len(costs)} stages of a network whose forward pass can be cut at "
            f"{int(found.legal.sum())} calls"
        )
    return partition(costs, found.sent, found.legal, order)


def plan_to_json(plan: StagePlan) -> list[Any]:
    """Returns a plan as JSON, for other ranks."""
    return [plan.starts, plan.rows]


def plan_of_json(content: Sequence[Any]) -> StagePlan:
    """Returns the plan of `plan_to_json`."""
    starts, rows = content
    return StagePlan([Key(*each) for each in starts], [tuple(row) for row in rows])
