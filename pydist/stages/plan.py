"""The plan of stages: where a recorded forward pass is cut, by time or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from pydist.errors import UsageError
from pydist.stages.calls import Key
from pydist.stages.part_memory import PartMemory
from pydist.stages.record import RecordedPass
from pydist.stages.schedule import Schedule
from pydist.stages.uses import Uses

_SLACK = 1.02
"""Stages may cost this much more than the best possible, if less is sent then."""

PartCosts = Callable[[Sequence[int]], Iterator[np.ndarray]]
"""What parts of a pass cost a stage, given the calls with which parts may begin: for each of them,
the costs of the parts that end where the next one begins, by their first call."""


@dataclass
class StagePlan:
    """Plan that says where the stages of a network begin.

    Attributes:
        starts: the first call of each stage but the first.
        rows: of the table of `str(plan)`: calls, milliseconds, MiB that a micro-batch needs in
            memory, MiB received.
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
        uses, stage = Uses(model), 0
        for cost, operands in zip(found.costs, found.operands, strict=True):
            if stage < len(self.starts) and cost.key == self.starts[stage]:
                stage += 1
            uses.note(cost.key.module, operands, schedule.meshes(stage))
        return uses

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
) -> StagePlan:
    """Cuts a recorded forward pass into stages.

    Args:
        found: the pass.
        ranks: that each stage has for a sample; they divide its time and memory.
        balance: what the largest stage has least of: "time", or "memory": what its micro-batches
            keep for their backward passes, and what one of these needs besides; see `PartMemory`.
        cuts: paths of modules whose first calls begin the stages from the second on; overrides
            `balance`.
        alive: the micro-batches that each stage keeps at once; by default one.

    Returns:
        The plan: the cuts with the least maximum over stages, and of nearly equal ones those that
        send least. Exact, by dynamic programming.

    Raises:
        UsageError: there are fewer calls than stages, or a cut is none of the network.
    """
    if balance not in BALANCES:
        raise UsageError(f"balance={balance!r}; possible are {', '.join(BALANCES)}")
    alive = alive or [1] * len(ranks)
    memory = PartMemory(found, frees=max(ranks) == 1)
    if cuts is None:
        seconds = [cost.seconds for cost in found.costs]
        costs = [
            times(seconds, n) if balance == "time" else memories(memory, n, kept)
            for n, kept in zip(ranks, alive, strict=True)
        ]
        at = _balanced(found, costs)
    else:
        at = _at_modules(found, cuts, len(ranks))
    rows = []
    most = (column[-1] for _, column in memory.columns([0, *at]))
    for a, b, nbytes in zip([0, *at], [*at, len(found.costs)], most, strict=True):
        ms = 1e3 * sum(c.seconds for c in found.costs[a:b])
        mib = float(nbytes) / 2**20
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


def memories(memory: PartMemory, ranks: int, alive: int = 1) -> PartCosts:
    """Returns the bytes that parts of a pass need on each rank of a stage.

    Args:
        memory: of the parts of the pass.
        ranks: of the stage, for a sample.
        alive: micro-batches whose saved tensors are kept. The backward pass of one runs at a time.
    """

    def columns(starts: Sequence[int]) -> Iterator[np.ndarray]:
        for saved, most in memory.columns(starts):
            yield ((alive - 1) * saved + most) / ranks

    return columns


def _balanced(found: RecordedPass, costs: Sequence[PartCosts]) -> list[int]:
    if 1 + int(found.legal.sum()) < len(costs):
        raise UsageError(
            f"{len(costs)} stages of a network whose forward pass can be cut at "
            f"{int(found.legal.sum())} calls"
        )
    return partition(costs, found.sent, found.legal)


def partition(costs: Sequence[PartCosts], sent: np.ndarray, legal: np.ndarray) -> list[int]:
    """Cuts a sequence into parts so that the largest cost is least.

    Args:
        costs: of each part; a longer part costs no less.
        sent: what a cut before each element costs in addition; its sum is least among partitions
            whose largest part is at most 2 % above the least possible.
        legal: whether a part may begin with each element; at least as many as there are parts.

    Returns:
        The first element of each part but the first.
    """
    starts = [0, *(int(i) for i in np.flatnonzero(legal) if i > 0)]
    best = _search(costs, starts, np.zeros(len(starts)), None)[0]
    prices = np.asarray([0.0, *(float(sent[i]) for i in starts[1:])])
    return _search(costs, starts, prices, best * _SLACK)[1]


def _search(
    costs: Sequence[PartCosts],
    starts: Sequence[int],
    prices: np.ndarray,
    limit: float | None,
) -> tuple[float, list[int]]:
    """Returns the least value of a partition, and its cuts.

    The value is the largest part or, with a limit on parts, the sum of the cuts' prices.
    """
    # Of the parts so far, by where they end: before the next start.
    value = np.asarray([column[0] for column in costs[0](starts)])
    if limit is not None:
        value = np.where(value <= limit * (1 + 1e-12), 0.0, np.inf)
    chosen = []
    for part_costs in costs[1:]:
        new, cut = np.full(len(starts), np.inf), np.zeros(len(starts), dtype=int)
        for j, column in enumerate(part_costs(starts)):
            if j == 0:
                continue
            part = column[1:]
            if limit is None:
                candidates = np.maximum(value[:j], part)
            else:
                fits = part <= limit * (1 + 1e-12)
                candidates = np.where(fits, value[:j] + prices[1 : j + 1], np.inf)
            i = int(candidates.argmin())
            new[j], cut[j] = candidates[i], i + 1
        value = new
        chosen.append(cut)
    j, found = len(starts) - 1, list[int]()
    for cut in reversed(chosen):
        found.append(starts[cut[j]])
        j = int(cut[j]) - 1
    return float(value[-1]), found[::-1]


def plan_to_json(plan: StagePlan) -> list[Any]:
    """Returns a plan as JSON, for other ranks."""
    return [plan.starts, plan.rows]


def plan_of_json(content: Sequence[Any]) -> StagePlan:
    """Returns the plan of `plan_to_json`."""
    starts, rows = content
    return StagePlan([Key(*each) for each in starts], [tuple(row) for row in rows])
