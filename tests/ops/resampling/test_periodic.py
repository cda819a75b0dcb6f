"""Split rolls and flips equal the one-device run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.equivalence import (
    check_function,
    layout_at,
    on_ranks,
    on_shards,
    randint,
    randn,
    shard,
)
from support.equivalence.strategies import cuts


@pytest.mark.parametrize("dims", [1, 2, 3])
@settings(max_examples=15)
@given(data=st.data())
def test_any_roll(dims, data):
    extents = data.draw(st.lists(st.integers(1, 7), min_size=dims, max_size=dims), "extents")
    along = data.draw(st.lists(st.integers(-dims - 2, dims + 1), min_size=1, max_size=4), "dims")
    shifts = data.draw(st.lists(st.integers(-9, 9), min_size=len(along), max_size=len(along)))
    check_function(
        lambda x: torch.roll(x * x, shifts, along), randn(2, 2, *extents), (),
        data.draw(cuts(extents), "points"), second_order=data.draw(st.booleans(), "second order"),
    )  # fmt: skip


@pytest.mark.parametrize("dims", [1, 2, 3])
@settings(max_examples=10)
@given(data=st.data())
def test_any_flip(dims, data):
    extents = data.draw(st.lists(st.integers(1, 7), min_size=dims, max_size=dims), "extents")
    along = data.draw(st.sets(st.integers(0, dims + 1)), "dims")
    check_function(
        lambda x: torch.flip(x * x, tuple(along)), randn(2, 2, *extents), (),
        data.draw(cuts(extents), "points"), second_order=data.draw(st.booleans(), "second order"),
    )  # fmt: skip


CALLS = {
    "roll of a method": lambda x: x.roll(2, 2),
    "roll by keywords": lambda x: torch.roll(input=x, shifts=(1, -1), dims=(2, 4)),
    "roll of the flattened tensor": lambda x: torch.roll(x, -7) + x.roll((2,), ()),
    "roll by nothing": lambda x: torch.roll(x, 6, 2).neg_() + x,
    "roll by nothing of a whole dim": lambda x: torch.roll(x, 0, 1).neg_() + x,
    "flip of a method": lambda x: x.flip(2, -1),
    "quarter turn": lambda x: torch.rot90(x * x, 1, (2, 3)),
    "half turn": lambda x: x.rot90(2, (-1, 1)),
    "quarter turn back": lambda x: torch.rot90(x, -1, [4, 2]),
    "no turn": lambda x: torch.rot90(x, 4, (3, 4)).neg_() + x,
    "flip of a list": lambda x: x.flip([0, 2]),
    "flip by keyword": lambda x: torch.flip(x, dims=[2]),
    "fliplr": lambda x: x.fliplr(),
    "flipud": lambda x: x[0, 0].flipud(),
    "flip of no dim": lambda x: torch.flip(x, ()).neg_() + x,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_by_name(call):
    check_function(lambda x: call(x * x), randn(2, 3, 6, 5, 4), (), [[0, 0, 2, 6], None, [0, 1, 4]])


def test_a_vector_with_empty_shards_in_second_order():
    check_function(
        lambda x, w: x.roll(1, 0) * x * w, randn(3), [randn(1, seed=1)], [[0, 1, 1, 3]],
        second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("call", [CALLS["roll by keywords"], CALLS["flip of a method"]])
def test_labels(call):
    x = randint(9, 1, 1, 6, 5, 4)

    def body(mesh):
        y = call(shard(x, layout_at(mesh, x.shape, [[0, 1, 6], None, [0, 2, 4]])))
        assert torch.equal(y.full_tensor(), call(x))

    on_ranks((2, 1, 2), body)


def test_refusals():
    def body(x, _):
        with pytest.raises(RuntimeError, match="dimensions"):
            torch.roll(x, (1, 2), 2)
        with pytest.raises(IndexError):
            torch.flip(x, (5,))

    on_shards(body)
