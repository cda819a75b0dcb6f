"""Layouts in which each rank has all elements of some dims."""

from __future__ import annotations

from pydist import Layout
from pydist.ops.transposition import scaled_layout, whole_along
from support.equivalence import layout_at, on_ranks


def points_of(layout: Layout) -> list[list[int] | None]:
    return [None if split is None else list(split.partition.points) for split in layout.splits]


def test_splits_move_to_the_dim_with_the_longest_blocks():
    def body(mesh):
        layout = layout_at(mesh, (1, 3, 8, 6, 5), [[0, 3, 8], [0, 4, 6], None])
        moved = whole_along(layout, (2,))
        assert points_of(moved) == [None, None, None, [0, 4, 6], [0, 3, 5]]
        assert moved.splits[4].axes == ("depth",)
        assert moved.replicas == 1
        further = whole_along(layout, (1, 2, 4))
        assert points_of(further) == [None, None, None, [0, 2, 4, 5, 6], None]
        assert further.splits[3].axes == ("height", "depth")

    on_ranks((2, 2, 1), body)


def test_ranks_hold_copies_where_no_dim_is_left():
    def body(mesh):
        layout = layout_at(mesh, (1, 1, 8, 6, 5), [[0, 3, 8], [0, 4, 6], None])
        assert whole_along(layout, (2, 3, 4)).replicas == 4
        assert whole_along(layout, (4,)) == layout

    on_ranks((2, 2, 1), body)


def test_new_extents_keep_the_proportions():
    def body(mesh):
        layout = layout_at(mesh, (1, 3, 8, 6, 5), [[0, 2, 8], None, None])
        assert points_of(scaled_layout(layout, (1, 3, 4, 6, 5)))[2] == [0, 1, 4]
        assert points_of(scaled_layout(layout, (1, 3, 1, 6, 5)))[2] is None

    on_ranks((2, 1, 1), body)
