"""Adaptive windows: the needs of outputs and the feeds of inputs, against the definition."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist.partition import Footprint, Partition
from support.equivalence.strategies import points

EXTENTS = st.integers(1, 14)


def window(n: int, m: int, o: int) -> range:
    """Returns the inputs of one output, as torch documents them."""
    return range(o * n // m, -((o + 1) * n // -m))


@given(EXTENTS, EXTENTS, st.data())
def test_needs_and_feeds_are_the_windows(n, m, data):
    footprint = Footprint.adaptive(n, m)
    windows = [window(n, m, o) for o in range(m)]
    assert footprint.output_extent(n) == footprint.outputs == m
    assert footprint.kernel == max(map(len, windows))
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, m), st.integers(0, m)), "outputs"))
    needed = range(*footprint.needs(lo, hi))
    assert set(needed) == {i for w in windows[lo:hi] for i in w}
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)), "inputs"))
    fed = range(*footprint.feeds(lo, hi))
    assert set(fed) == {o for o, w in enumerate(windows) if set(w) & set(range(lo, hi))}


@given(EXTENTS, EXTENTS, st.integers(1, 5), st.data())
def test_outputs_go_to_the_part_that_holds_their_center(n, m, parts, data):
    partition = Partition(data.draw(points(n, parts), "points"))
    split = Footprint.adaptive(n, m).output_partition(partition)
    assert split.extent == m
    for o in range(m):
        inputs = window(n, m, o)
        center = (inputs.start + inputs.stop - 1) // 2
        assert split.owner(o) == partition.owner(center)


def test_is_a_value_of_its_own_kind():
    footprint = Footprint.adaptive(7, 3)
    assert pickle.loads(pickle.dumps(footprint)) == footprint
    assert (
        len({footprint, Footprint.adaptive(7, 3), Footprint.adaptive(7, 4), Footprint(3, 2)}) == 3
    )
    assert repr(footprint) == "Footprint.adaptive(7, 3)"
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Footprint.adaptive(*wrong)
    with pytest.raises(ValueError, match="extent of 8"):
        footprint.output_extent(8)
