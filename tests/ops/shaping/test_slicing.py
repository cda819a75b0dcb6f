"""Slices, indices and assignments, of unsplit dims and split ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist.errors import NotSupported, UsageError
from support.equivalence import Cut, check_function, layout_at, on_ranks, randint, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import THREE_SPLITS as POINTS
from support.equivalence.strategies import cuts

MASK = torch.tensor([True, False, True])
CALLS = {
    "int": lambda x: x[1],
    "channel": lambda x: x[:, 1],
    "slice": lambda x: x[:, 1:3] * 2,
    "ellipsis": lambda x: x[..., :, :],
    "negative": lambda x: x[:, -1:],
    "None": lambda x: x[:, None] * x[:, :, None, ...].sum(),
    "step": lambda x: x[:, ::2, ::2, 1::2],
    "int of a split dim": lambda x: x[:, 0, 4, -1],
    "crop": lambda x: x[:, :, 1:-1, 1:, :-1] * 2,
    "crop, then a layer": lambda x: F.avg_pool3d(x[:, :, 1:, :-1], 2, 1),
    "numpy's int": lambda x: x[np.int64(1), :, torch.tensor(2)],
    "nothing": lambda x: x[:, :, 2:2].sum() * x,
    "select": lambda x: x.select(2, -1) * torch.select(x, 0, 1).sum(),
    "narrow": lambda x: x.narrow(2, 1, 3) * torch.narrow(x, 4, -2, 1).sum(),
    "split": lambda x: x.split(2, 2)[1] * torch.split(x, [1, 2], dim=1)[1].sum(),
    "split_with_sizes": lambda x: x.split_with_sizes([1, 3, 1], dim=2)[1],
    "chunk": lambda x: sum(c.square() for c in x.chunk(2, 3)),
    "tensor_split": lambda x: x.tensor_split(2, 2)[1] * x.tensor_split((1, 3), dim=2)[2],
    "unbind": lambda x: sum(x.unbind(2)) * torch.unbind(x, 4)[1].sum(),
    "iteration": lambda x: torch.stack(list(x[:, 0, :, 0]), 2),
    "index": lambda x: x[:, torch.tensor([0, 2, 2])],
    "list": lambda x: x[[1, 0, 1], :, 1:],
    "array": lambda x: x[:, np.array([[0, 1], [2, 0]])],
    "index of a split dim": lambda x: x[:, :, torch.tensor([3, 0]), 1:],
    "indices, apart": lambda x: x[torch.tensor([0, 1]), :, :, torch.tensor([3, 1])],
    "indices, neighbors": lambda x: x[:, torch.tensor([[0], [1]]), torch.tensor([4, 2])],
    "mask of channels": lambda x: x[:, MASK],
    "mask of two dims": lambda x: x[torch.stack([MASK, ~MASK])],
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "gather": lambda x: torch.gather(x, 1, randint(3, 2, 4, 5, 4, 3)),
    "gather, fewer": lambda x: x.gather(2, randint(5, 2, 2, 7, 3, 2)),
    "take_along_dim": lambda x: torch.take_along_dim(x, randint(3, 1, 2, 5, 1, 3), 1),
    "take_along_dim of all": lambda x: x.take_along_dim(randint(9, 4)),
    "by its own order": lambda x: torch.gather(x, 1, x.argsort(1)),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(*SHAPE), (), points, second_order=True)


@st.composite
def entries(draw, extent):
    bound = st.none() | st.integers(-extent - 1, extent + 1)
    return slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3])))


@given(data=st.data())
@settings(max_examples=40)
def test_any_slices(data):
    extents = data.draw(st.tuples(*[st.integers(1, 6)] * 3))
    index = [data.draw(entries(n) | st.integers(-n, n - 1)) for n in extents]
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, 3)), None)
    where = data.draw(cuts(extents))
    check_function(lambda x: x[:, 0][(..., *index)] * 2, randn(2, 1, *extents), (), where)


def test_slices_keep_their_place():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        assert x[:, :, 1:].layout.splits[2].partition.points == (0, 1, 4)
        assert x[:, :, ::2].layout.splits[2].partition.points == (0, 1, 3)
        assert not any(key[0] == "redistribute" for key in mesh.session.plans)

    on_ranks((2, 1, 1), body)


def test_slices_of_gathered_features():
    check_function(
        lambda x: x.flatten(1)[:, 3:7] * x.flatten(1)[1, 2], randn(*SHAPE), (),
        [[0, 2, 5], [0, 1, 4], None], second_order=True,
    )  # fmt: skip


def test_gather_by_indices_of_another_layout():
    """The source is sharded or plain."""
    check_function(
        lambda x, i, p: x.gather(1, i) + p.gather(1, i),
        randn(*SHAPE), [randn(*SHAPE, seed=2)], [[0, 2, 5], None, [0, 1, 3]],
        beside=[Cut(randint(3, *SHAPE), [[0, 4, 5], None, [0, 3, 3]])],
        second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("last", [[0, 1, 3], [0, 0, 3]], ids=str)
def test_a_table_at_sharded_indices(last):
    points = [[0, 2, 5], None, last]
    check_function(
        lambda x, i, table: (F.embedding(i, table).movedim(-1, 1) * x).square(),
        randn(*SHAPE), [randn(7, 3, seed=2)], points,
        beside=[Cut(randint(7, 2, 5, 4, 3), points)], second_order=True,
    )  # fmt: skip


def test_chunks_of_nothing():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        found = x[:, :, 5:].chunk(3, 2)
        assert [tuple(each.shape) for each in found] == [(2, 3, 0, 4, 3)] * 3

    on_ranks((2, 1, 1), body)


# -- assignments ----------------------------------------------------------------------------


def _set_after_exchange(x, index, value):
    y = F.conv3d(x, torch.ones(3, 3, 3, 3, 3, dtype=x.dtype), padding=1)
    y[index] = value
    return y.sin()


def _set(x, index, value):
    y = x * x
    y[index] = value
    return y * x


ASSIGNED = {
    "number": lambda x, p: _set(x, (slice(None), 1), 3.0),
    "number in a split dim": lambda x, p: _set(x, (..., slice(1, 4, 2), slice(None), 0), 3.0),
    "mask": lambda x, p: _set(x, x > 0.5, 2.0),
    "mask of a batch": lambda x, p: _set(x, torch.tensor([True, False]), torch.tensor(2.0)),
    "plain": lambda x, p: _set(x, (slice(None), 2), p),
    "plain, broadcast": lambda x, p: _set(x, (0, slice(1, None), slice(1, 4)), p[1, 1:4, :, :1]),
    "plain, into a slice": lambda x, p: _set(x, (slice(None), 0, 3), p[:, 1]),
    "sharded": lambda x, p: _set(x, (slice(None), slice(1)), x[:, 2:] * p[:, None]),
    "sharded, shifted": lambda x, p: _set(x, (..., slice(1, None), 0, 2), x[:, :, :-1, 3, 0]),
    "sharded, one element": lambda x, p: _set(x, (0, 1, 4, None, 3), x[0, 0, 0, 0]),
    "number in whole blocks": lambda x, p: _set_after_exchange(
        x, (slice(None), slice(None), slice(2)), 3.0
    ),
    "plain, into whole blocks": lambda x, p: _set_after_exchange(
        x, (slice(None), slice(None), slice(2)), p[:, None, 2:4, :, :]
    ),
    "leading dims of one": lambda x, p: _set(x, 0, x[:1] * 2),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", ASSIGNED.values(), ids=ASSIGNED)
def test_assigned_to_second_order(call, points):
    check_function(call, randn(*SHAPE), [randn(2, 5, 4, 3, seed=1)], points, second_order=True)


def test_assigned_into_a_plain_tensor():
    """The plain tensor becomes sharded with the layout of the assigned value."""

    def call(x):
        y = torch.zeros(2, 5, 5, 4, 3, dtype=torch.float64)
        y[:, 1:4] = x * x
        y[:, 4, ..., None] = x[:, 0, ..., None]
        return y * y

    check_function(call, randn(*SHAPE), (), [[0, 2, 5], [0, 1, 4], None], second_order=True)


REFUSED = {
    "True": (lambda x: x[True], "an index True"),
    "an embedding with max_norm": (
        lambda x: F.embedding(x.long(), randn(9, 2), max_norm=1.0), "only padding_idx",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match=message):
            call(x)

    on_ranks((2, 1, 1), body)


def test_a_value_in_the_shape_of_the_shard_is_named():
    def body(mesh):
        x = shard(randn(3, 4), layout_at(mesh, (3, 4), [[0, 2, 4]])).detach()
        with pytest.raises(UsageError, match="has the shape of this rank's shard"):
            x[:] = randn(3, 2)
        with pytest.raises(RuntimeError, match="can't be assigned"):
            x[:, 1:] = randn(5, 2)

    on_ranks((2, 1, 1), body)
