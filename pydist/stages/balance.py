"""Balances stages: cuts a sequence into parts so that the largest cost of a mesh is least."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

_SLACK = 1.02
"""A mesh may cost this much more than the best possible, if less is sent then."""
_ROUNDING = 1 + 1e-12
_MOST = 3_000_000
"""Partial cuts that a search over meshes with several parts compares: some seconds, and enough for
two meshes with two parts each of 250 elements."""
_PIVOTS = 16

PartCosts = Callable[[Sequence[int]], Iterator[np.ndarray]]
"""What parts of a sequence cost a stage, given the elements with which parts may begin: for each of
them, the costs of the parts that end where the next one begins, by their first element."""


def partition(
    costs: Sequence[PartCosts],
    sent: np.ndarray,
    legal: np.ndarray,
    order: Sequence[int],
    most: int = _MOST,
) -> list[int]:
    """Cuts a sequence into parts so that the largest sum of a mesh's costs is least.

    Of partitions with sums up to 2 % above that, the best ones divide each mesh equally among its
    parts, and of those, again up to 2 %, the one is chosen that sends least. Exact by dynamic
    programming, unless meshes with several parts have too many partial cuts: then an equal division
    of the meshes comes first.

    Args:
        costs: of each part; a longer part costs no less.
        sent: what a cut before each element costs in addition.
        legal: whether a part may begin with each element; at least as many as there are parts.
        order: the mesh of each part.
        most: partial cuts that are compared at most for meshes with several parts.

    Returns:
        The first element of each part but the first.
    """
    starts = [0, *(int(i) for i in np.flatnonzero(legal) if i > 0)]
    prices = np.asarray([0.0, *(float(sent[i]) for i in starts[1:])])
    search = _Search(costs, starts, prices, order, most)
    apart = _Search(costs, starts, prices, order, math.inf, together=False)
    even = apart.least("part")
    assert even is not None
    if len({*order}) < len(order):
        try:
            return search.best(even)
        except _TooManyError:
            pass
    cheapest = apart.least("sent", parts=even.value * _SLACK)
    assert cheapest is not None
    return cheapest.cuts


class _Found(NamedTuple):
    """Partition that a search has found.

    Attributes:
        value: what was to be least.
        cuts: the first element of each part but the first.
    """

    value: float
    cuts: list[int]


class _TooManyError(Exception):
    """More partial cuts are possible than a search may compare."""


class _Search:
    """Search that compares partitions by dynamic programming over undominated partial cuts.

    A partial cut ends the parts so far before an element. Another one that ends there is no better
    if no mesh that gets a later part costs less, and the value is no less.

    Args:
        costs: as of `partition`, like `order` and `most`.
        starts: the elements with which parts may begin.
        prices: what a cut before each of them costs.
        together: whether the costs of a mesh's parts are summed; else each part has a mesh of its
            own.
    """

    def __init__(
        self,
        costs: Sequence[PartCosts],
        starts: Sequence[int],
        prices: np.ndarray,
        order: Sequence[int],
        most: float,
        *,
        together: bool = True,
    ) -> None:
        self._costs, self._starts, self._prices, self._most = costs, starts, prices, most
        parts = Counter(order)
        self._shares = [parts[mesh] for mesh in order]
        self._order = list(order) if together else list(range(len(order)))

    def best(self, even: _Found) -> list[int]:
        """Returns the best cuts; see `partition`.

        Args:
            even: the most equal division of the meshes.
        """
        bound = self._largest_sum(even.cuts)
        lower = self.least("sum", sums=bound / _ROUNDING**2)  # or none is
        sums = _SLACK * (bound if lower is None else lower.value)
        equal = self.least("part", sums=sums)
        assert equal is not None
        found = self.least("sent", sums=sums, parts=equal.value * _SLACK)
        assert found is not None
        return found.cuts

    def least(
        self, objective: str, *, sums: float = math.inf, parts: float = math.inf
    ) -> _Found | None:
        """Returns the partition of the least value; `None` if there is none within the limits.

        Args:
            objective: the value: "sum", the largest of a mesh; "part", the largest part, times the
                number of parts on its mesh; "sent", the sum of the prices of the cuts.
            sums: limit of a mesh's costs.
            parts: limit of a part's, times the number of parts on its mesh.
        """
        order, last, count = self._order, len(self._starts) - 1, len(self._order)
        meshes = max(order) + 1
        # Of the partial cuts: the start of the next part, costs of meshes, value.
        at, costs, value = np.zeros(1, int), np.zeros((1, meshes)), np.zeros(1)
        history: list[tuple[np.ndarray, np.ndarray]] = []
        compared = 0
        for k, (mesh, share) in enumerate(zip(order, self._shares, strict=True)):
            later = {*order[k + 1 :]}
            waiting = [m for m in range(meshes) if m in later and m in order[: k + 1]]
            found = []
            limit = min(sums, parts / share) * _ROUNDING
            for end, column in enumerate(self._costs[k](self._starts)):
                if end < k or end > last - (count - 1 - k) or (k == count - 1 and end < last):
                    continue
                first = int((column <= limit).argmax())  # parts that begin before cost too much
                a, b = np.searchsorted(at, [first, end + 1])
                compared += int(b - a)
                if compared > self._most:
                    raise _TooManyError
                part = column[at[a:b]]
                total = costs[a:b, mesh] + part
                chosen = np.flatnonzero((part <= limit) & (total <= sums * _ROUNDING))
                if not len(chosen):
                    continue
                new = value[a:b][chosen]
                if objective == "sent":
                    new = new + self._prices[at[a:b][chosen]]
                elif objective == "part":
                    new = np.maximum(new, share * part[chosen])
                elif mesh not in later:
                    new = np.maximum(new, total[chosen])
                rows = costs[a:b][chosen]
                rows[:, mesh] = total[chosen]
                kept = _undominated(np.column_stack([rows[:, waiting], new]))
                found.append((np.full(len(kept), end + 1), rows[kept], new[kept], a + chosen[kept]))
            if not found:
                return None
            history.append((at, np.concatenate([each[3] for each in found])))
            at, costs, value = (np.concatenate([each[i] for each in found]) for i in range(3))
        return _Found(float(value[0]), self._cuts(history))

    def _cuts(self, history: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[int]:
        """Returns the cuts of the last partial cut; each step has those before, and its parents."""
        cuts, state = [], 0
        for at, parents in reversed(history):
            state = int(parents[state])
            cuts.append(self._starts[at[state]])
        return cuts[-2::-1]

    def _largest_sum(self, cuts: Sequence[int]) -> float:
        first = [0, *(self._starts.index(cut) for cut in cuts)]
        sums = dict.fromkeys(self._order, 0.0)
        ends = [*(i - 1 for i in first[1:]), len(self._starts) - 1]
        for costs, mesh, begin, end in zip(self._costs, self._order, first, ends, strict=True):
            column = next(c for i, c in enumerate(costs(self._starts)) if i == end)
            sums[mesh] += float(column[begin])
        return max(sums.values())


def _undominated(points: np.ndarray) -> np.ndarray:
    """Returns indices of points that no other one dominates; of three dims or more, some others."""
    if points.shape[1] == 1:
        return np.asarray([points.argmin()])
    if points.shape[1] == 2:
        by_first = np.lexsort((points[:, 1], points[:, 0]))
        second = points[by_first, 1]
        before = np.minimum.accumulate(np.concatenate([[np.inf], second[:-1]]))
        return by_first[second < before]
    left = points.sum(1).argsort()
    for i in range(_PIVOTS):
        if i >= len(left):
            break
        worse = (points[left] >= points[left[i]]).all(1)
        worse[: i + 1] = False
        left = left[~worse]
    return left
