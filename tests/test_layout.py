"""Tests of layouts: every element is stored where the layout says, once or in equal copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist import Layout, Partition, Split, layout_for_sample
from pydist.errors import UsageError
from pydist.layout import split_along
from support.equivalence import on_ranks


@given(shape=st.tuples(*[st.integers(1, 5)] * 5))
def test_samples_are_covered_once(shape):
    def body(mesh):
        layout = layout_for_sample(mesh, shape)
        assert layout.local_shape == tuple(layout.box.shape)
        assert layout.boxes[mesh.sample_index] == layout.box
        return layout.boxes, layout.replicas

    boxes, replicas = on_ranks((2, 1, 3), body)[0]
    held = np.zeros(shape, int)
    for box in boxes:
        held[box.slices] += 1
    assert (held == replicas).all()
    assert replicas == 1


@given(data=st.data())
def test_unused_axes_hold_copies(data):
    joint = data.draw(
        st.sampled_from([(), ("depth",), ("width", "depth"), ("depth", "height", "width")])
    )
    parts = 2 ** len(joint)
    points = [
        0,
        *sorted(data.draw(st.lists(st.integers(0, 6), min_size=parts - 1, max_size=parts - 1))),
        6,
    ]

    def body(mesh):
        return Layout(mesh, (6, 2), [Split(joint, Partition(points)) if joint else None, None])

    layout = on_ranks((2, 2, 2), body)[0]
    assert layout.replicas == 8 // parts
    for part in range(parts):
        expected = (points[part], points[part + 1])
        assert sum((b.lo[0], b.hi[0]) == expected for b in layout.boxes) >= layout.replicas


def test_axes_of_a_joint_split_count_the_last_fastest():
    def body(mesh):
        split = Split(("width", "depth"), Partition([0, 1, 3, 6, 10]))
        layout = Layout(mesh, (10,), [split])
        return mesh.coords["width"], mesh.coords["depth"], layout.box.lo[0]

    for width, depth, lo in on_ranks((2, 1, 2), body):
        assert lo == [0, 1, 3, 6][2 * width + depth]


def test_sizes_that_do_not_divide_get_blocks_that_differ_by_one():
    def body(mesh):
        return layout_for_sample(mesh, (1, 1, 10, 7, 2)).local_shape

    found = on_ranks((3, 2, 1), body)
    assert found == [(1, 1, d, h, 2) for d in (4, 3, 3) for h in (4, 3)]


def test_equality_and_hash():
    def body(mesh):
        a, b = (layout_for_sample(mesh, (1, 1, 4, 4, 4)) for _ in range(2))
        assert a == b
        assert hash(a) == hash(b)
        assert a != a.whole()
        assert a != layout_for_sample(mesh, (2, 1, 4, 4, 4))
        assert a != "layout"
        assert a.whole() == layout_for_sample(mesh, (1, 1, 4, 4, 4), dims={})

    on_ranks((2, 1, 1), body)


def test_repr_names_the_points():
    def body(mesh):
        layout = layout_for_sample(mesh, (1, 1, 5, 4, 4))
        assert "dim 2 over depth at [0, 3, 5]" in repr(layout)
        assert "whole on every rank" in repr(layout.whole())

    on_ranks((2, 1, 1), body)


def test_dims_by_name():
    def body(mesh):
        layout = layout_for_sample(mesh, (6, 4), dims={0: "width", 1: "depth"})
        assert layout.split_dims == (0, 1)
        assert layout.splits[0].axes == ("width",)
        assert layout.replicas == 1

    on_ranks((2, 1, 3), body)


def test_an_axis_of_one_rank_splits_nothing():
    def body(mesh):
        assert split_along(mesh, 5, "depth") is None
        assert layout_for_sample(mesh, (1, 1, 4, 4, 4)).split_dims == (3,)

    on_ranks((1, 2, 1), body)


def depth(points):
    return Split(("depth",), Partition(points))


REFUSED = {
    "not 5-D": (lambda m: layout_for_sample(m, (4, 4)), r"\[N, C, D, H, W\] expected"),
    "no such dim": (lambda m: layout_for_sample(m, (4, 4), {5: "depth"}), "dim 5"),
    "dims in a list": (lambda m: layout_for_sample(m, (4, 4), [0]), r"dims=\[0\]: expected"),
    "a dim's name": (lambda m: layout_for_sample(m, (4, 4), {"a": "depth"}), "dim a of"),
    "the data axis": (lambda m: layout_for_sample(m, (4, 4), {0: "data"}), "axis 'data'"),
    "no such axis": (lambda m: layout_for_sample(m, (4, 4), {0: "pipe"}), "axis 'pipe'"),
    "an axis twice": (lambda m: Layout(m, (4, 4), [depth([0, 2, 4])] * 2), "once"),
    "another extent": (lambda m: Layout(m, (5, 4), [depth([0, 2, 4]), None]), "extent 5"),
    "another number of parts": (lambda m: Layout(m, (4,), [depth([0, 1, 2, 4])]), "takes 2 parts"),
    "too few splits": (lambda m: Layout(m, (4, 4), [None]), "1 splits"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(make, message):
    def body(mesh):
        with pytest.raises(UsageError, match=message):
            make(mesh)

    on_ranks((2, 1, 1), body)
