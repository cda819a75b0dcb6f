"""Tests of balancing: cuts are the best ones of all, also where meshes hold several stages."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist.stages.balance import partition
from pydist.stages.plan import times

ORDERS = (
    [0], [0, 0], [0, 1], [0, 1, 0], [1, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1], [0, 1, 2, 0],
    [0, 1, 2, 2, 1, 0], [0, 1, 0, 1, 0], [0, 1, 2, 0, 1, 2],
)  # fmt: skip
SLACK = 1.02 * (1 + 1e-9)
ELEMENTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.integers(0, 9)),
    min_size=2, max_size=10,
)  # fmt: skip


def least(every, key, limits=()):
    """Returns the least value of all cuts within limits."""
    within = [each for each in every if all(each[i] <= limit for i, limit in limits)]
    return min(each[key] for each in within)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@given(ELEMENTS, st.tuples(*[st.integers(1, 3)] * 3))
def test_cuts_are_the_best_of_all(order, elements, ranks):
    """Costs are sums, as of time, and maxima, as of what one backward pass needs in memory."""
    legal = np.asarray([i > 0 and allowed for i, (_, _, allowed, _) in enumerate(elements)])
    sent = np.asarray([float(price) for *_, price in elements])
    if legal.sum() < len(order) - 1:
        return

    def cost(stage, a, b):
        part = elements[a:b]
        return (sum(e[0] for e in part) + max(e[1] for e in part)) / ranks[order[stage]]

    def costs_of(stage):
        def columns(starts):
            for j, stop in enumerate([*starts[1:], len(elements)]):
                yield np.asarray([cost(stage, a, stop) for a in starts[: j + 1]])

        return columns

    def values(at):
        ends = [0, *at, len(elements)]
        parts = [cost(s, *part) for s, part in enumerate(itertools.pairwise(ends))]
        sums = Counter()
        for mesh, part in zip(order, parts, strict=True):
            sums[mesh] += part
        share = max(order.count(m) * part for m, part in zip(order, parts, strict=True))
        return max(sums.values()), share, sum(sent[i] for i in at)

    every = [values(at) for at in itertools.combinations(np.flatnonzero(legal), len(order) - 1)]
    costs = [costs_of(stage) for stage in range(len(order))]
    found = values(partition(costs, sent, legal, order))
    sums = (0, least(every, 0) * SLACK)
    parts = (1, least(every, 1, [sums]) * SLACK)
    assert found[0] <= sums[1]
    assert found[1] <= parts[1]
    assert found[2] == least(every, 2, [sums, parts])

    found = values(partition(costs, sent, legal, order, most=0))
    parts = (1, least(every, 1) * SLACK)
    if len({*order}) < len(order):
        assert found[1] <= parts[1]
        assert found[2] == least(every, 2, [parts])


def test_a_mesh_with_two_stages_gets_no_more_than_another():
    """In the order (0, 1, 0) the stages have a quarter, a half and a quarter of the time."""
    seconds, legal = np.ones(200), np.arange(200) > 0
    for order, expected in (([0, 1, 0], [50, 150]), ([0, 1, 1, 0], [50, 100, 150])):
        costs = [times(seconds, 1)] * len(order)
        assert partition(costs, np.zeros(200), legal, order) == pytest.approx(expected, abs=4)
