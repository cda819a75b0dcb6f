"""The plan of stages: where a recorded forward pass is cut, by time or memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from pydist.errors import UsageError
from pydist.stages.calls import Key
from pydist.stages.record import Record
from pydist.stages.schedule import Schedule
from pydist.stages.uses import Uses

_SLACK = 1.02
"""Stages may take this much longer than the best possible, if less is sent then."""


@dataclass
class Plan:
    """The stages of a network.

    Attributes:
        starts: the first call of each stage but the first.
        rows: of the table of `str(plan)`: calls, milliseconds, MiB of results, MiB received.
    """

    starts: list[Key]
    rows: list[tuple[int, float, float, float]] = field(default_factory=list)

    def uses(self, found: Record, model: nn.Module, schedule: Schedule) -> Uses:
        """Returns which meshes use each parameter and buffer, by a recorded pass."""
        uses, stage = Uses(model), 0
        for cost, operands in zip(found.costs, found.operands, strict=True):
            if stage < len(self.starts) and cost.key == self.starts[stage]:
                stage += 1
            uses.note(cost.key.module, operands, schedule.meshes(stage))
        return uses

    def __str__(self) -> str:
        head = ("stage", "calls", "time", "results", "receives", "begins with")
        total = sum(row[1] for row in self.rows) or 1.0
        lines = [head]
        for stage, (calls, ms, made, received) in enumerate(self.rows):
            begin = str(self.starts[stage - 1]) if stage else "the input"
            numbers = f"{ms / total:.0%}", f"{made:.1f} MiB", f"{received:.1f} MiB"
            lines.append((str(stage), str(calls), *numbers, begin))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        return "\n".join(
            "  ".join([*(c.rjust(w) for c, w in zip(line, widths, strict=False)), line[-1]])
            for line in lines
        )


BALANCES = ("time", "memory")


def make_plan(
    found: Record,
    weights: Sequence[float],
    balance: str = "time",
    cuts: Sequence[str] | None = None,
) -> Plan:
    """Cuts a recorded forward pass into stages.

    Args:
        found: the pass.
        weights: for each stage, what a unit of time or memory costs it: less, the more ranks it has
            for a sample; of memory more, the more micro-batches are alive.
        balance: what the largest stage has least of: "time", or "memory" (of results).
        cuts: paths of modules whose first calls begin the stages from the second on; overrides
            `balance`.

    Returns:
        The plan: the cuts with the least maximum over stages, and of nearly equal ones those that
        send least. Exact, by dynamic programming.

    Raises:
        UsageError: there are fewer calls than stages, or a cut is none of the network.
    """
    if balance not in BALANCES:
        raise UsageError(f"balance={balance!r}; possible are {', '.join(BALANCES)}")
    if cuts is None:
        at = _balanced(found, weights, balance)
    else:
        at = _at_modules(found, cuts, len(weights))
    rows = []
    for a, b in zip([0, *at], [*at, len(found.costs)], strict=True):
        costs = found.costs[a:b]
        ms, mib = 1e3 * sum(c.seconds for c in costs), sum(c.nbytes for c in costs) / 2**20
        rows.append((b - a, ms, mib, float(found.sent[a]) / 2**20 if a else 0.0))
    return Plan([found.costs[i].key for i in at], rows)


def _at_modules(found: Record, cuts: Sequence[str], stages: int) -> list[int]:
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


def _balanced(found: Record, weights: Sequence[float], balance: str) -> list[int]:
    stages = len(weights)
    costs = [c.seconds if balance == "time" else c.nbytes for c in found.costs]
    if 1 + int(found.legal.sum()) < stages:
        raise UsageError(
            f"{stages} stages of a network whose forward pass can be cut at "
            f"{int(found.legal.sum())} calls"
        )
    return partition(costs, found.sent, found.legal, weights)


def partition(
    costs: Sequence[float], sent: np.ndarray, legal: np.ndarray, weights: Sequence[float]
) -> list[int]:
    """Cuts a sequence into parts so that the largest weighted sum is least.

    Args:
        costs: of each element.
        sent: what a cut before each element costs in addition; its sum is least among partitions
            whose largest part is at most 2 % above the least possible.
        legal: whether a part may begin with each element.
        weights: of each part, > 0; at least that many parts may begin.

    Returns:
        The first element of each part but the first.
    """
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
    starts = [0, *(int(i) for i in np.flatnonzero(legal) if i > 0)]
    best = _search(ends, starts, weights, np.zeros(len(starts)), None)[0]
    prices = np.asarray([0.0, *(float(sent[i]) for i in starts[1:])])
    return _search(ends, starts, weights, prices, best * _SLACK)[1]


def _search(
    ends: np.ndarray,
    starts: Sequence[int],
    weights: Sequence[float],
    prices: np.ndarray,
    limit: float | None,
) -> tuple[float, list[int]]:
    """Returns the least value of a partition, and its cuts.

    The value is the largest part or, with a limit on parts, the sum of the cuts' prices.
    """
    first = np.asarray(starts)
    stops = np.append(first[1:], len(ends) - 1)  # where a part before the next start ends
    value = weights[0] * ends[stops]  # of one part, from the beginning
    if limit is not None:
        value = np.where(value <= limit * (1 + 1e-12), 0.0, np.inf)
    chosen = []
    for weight in weights[1:]:
        new, cut = np.full(len(starts), np.inf), np.zeros(len(starts), dtype=int)
        for j in range(1, len(starts)):
            part = weight * (ends[stops[j]] - ends[first[1 : j + 1]])
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
        found.append(int(first[cut[j]]))
        j = int(cut[j]) - 1
    return float(value[-1]), found[::-1]


def plan_to_json(plan: Plan) -> list[Any]:
    """Returns a plan as JSON, for other ranks."""
    return [plan.starts, plan.rows]


def plan_of_json(content: Sequence[Any]) -> Plan:
    """Returns the plan of `plan_to_json`."""
    starts, rows = content
    return Plan([Key(*each) for each in starts], [tuple(row) for row in rows])
