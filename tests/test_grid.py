"""Tests of grids of named axes: indices, coordinates and groups."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pydist.grid import AXES, SAMPLE_AXES, Grid

grids = st.tuples(*[st.integers(1, 3)] * len(AXES)).map(Grid)
some_axes = st.lists(st.sampled_from(AXES), unique=True).map(tuple)


@given(grids, some_axes)
def test_coordinates_and_indices_are_inverse(grid, axes):
    found = [tuple(grid.coords(i, axes).values()) for i in range(grid.size(axes))]
    assert found == sorted(set(found))  # the last axis varies fastest
    assert [grid.index(grid.coords(i, axes), axes) for i in range(grid.size(axes))] == list(
        range(grid.size(axes))
    )


@given(grids, some_axes)
def test_groups_hold_each_rank_once_with_those_that_differ_along_the_axes(grid, axes):
    groups = grid.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size()))
    for group in groups:
        assert group == sorted(group)
        assert len(group) == grid.size(axes)
        others = [tuple(c for a, c in grid.coords(r).items() if a not in axes) for r in group]
        assert len(set(others)) == 1


def test_an_axis_without_a_size_has_one_rank():
    grid = Grid.of({"data": 2, "depth": 3})
    assert grid.size() == 6
    assert grid.split() == ("data", "depth")
    assert grid.split(SAMPLE_AXES) == ("depth",)
    assert str(grid) == "data 2 × depth 3"
    assert str(Grid.of({})) == "1 rank"
    assert math.prod(grid.shape) == 6
