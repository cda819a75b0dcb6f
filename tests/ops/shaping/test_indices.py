"""Reads, writes and adds at sharded indices, at masks, and along split dims."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from pydist import distribute_tensor
from pydist.errors import NotSupported, UsageError
from support.equivalence import Cut, check_function, layout_at, on_ranks, randint, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import TWO_SPLITS as POINTS

ROWS = torch.tensor([3, 0, 0])
FULL = slice(None)
PLAIN = randn(5, 4, 3, seed=5)


def _assigned(x, index, value):
    y = x * 1
    y[index] = value
    return y * x


def _into_plain(x, index):
    plain = torch.zeros(5, 4)
    plain[index[2], :1] = 1.0
    y = torch.zeros(2, 3, 5, 4, 3, dtype=torch.float64)
    y[:, :, ROWS] = x[:, :, :3]
    y[index] += 1
    return y * x * plain.sum()


CALLS = {
    "mask": lambda x, i: x[x > 0] ** 2,
    "mask of dims": lambda x, i: x[:, 1, (x[0, 0] > 0)] ** 2,
    "of a plain tensor": lambda x, i: PLAIN[x[0, 0] > 0] * x.sum(),
    "masked_select": lambda x, i: x.masked_select(x[:, :1] > 0) ** 2,
    "sharded indices": lambda x, i: x[:, :, i[0, :, 0, 0]] ** 2,
    "sharded indices of two dims": lambda x, i: x[:, i[0, :, :, 0] % 3, :, i[1, :, :, 0] % 4] ** 2,
    "one sharded index": lambda x, i: x[:, :, i.sum() % 5] ** 2,
    "index_select": lambda x, i: x.index_select(1, i[0, :, 0, 0] % 3) ** 2,
    "assigned at indices": lambda x, i: _assigned(x, (..., ROWS[:2], FULL, FULL), x[:, :, 1:3]),
    "assigned numbers": lambda x, i: _assigned(x, (0, slice(1, 3), ROWS), 2.0),
    "assigned at both": lambda x, i: _assigned(x, (ROWS[1:] + 1, FULL, slice(1, 4)), x[:1, :1, 2:]),
    "assigned at sharded indices": lambda x, i: _assigned(x, (1, 2, i[0, :, 1, 1]), 3.0),
    "assigned at a mask": lambda x, i: _assigned(x, x > 0.5, x[x > 0.5] ** 2),
    "into a plain tensor": lambda x, i: _into_plain(x, (FULL, FULL, i[0, :1, 1, 1])),
    "scatter": lambda x, i: x.scatter(2, i[:, None].expand(2, 3, 5, 4, 3), x * 2),
    "scatter_add": lambda x, i: x.scatter_add(3, i[:, None, :, :2] % 4, x[:, :1, :, :2] ** 2),
    "scatter_ in place": lambda x, i: (x * 1).scatter_(2, i[:, None, :2], x[:, 1:2, :2] ** 2) * x,
    "scatter_reduce": lambda x, i: x.scatter_reduce(2, i[:, None], x[:, :1] ** 2, "amax"),
    "index_add": lambda x, i: x.index_add(2, ROWS, x[:, :, 1:4] ** 2, alpha=2) * x,
    "index_add_ of an unsplit dim": lambda x, i: (x * 1).index_add_(1, ROWS[1:], x[:, :2] ** 2),
    "index_copy_": lambda x, i: (x * 1).index_copy_(2, ROWS[:2], x[:, :, :2] ** 2) * x,
    "weighted counts": lambda x, i: torch.bincount(i.flatten(), x[:, 0].detach().flatten()),
    "index_fill": lambda x, i: x.index_fill(3, ROWS, 2.0) * x,
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    indices = Cut(randint(5, 2, 5, 4, 3), points)
    check_function(call, randn(*SHAPE), (), points, beside=[indices], second_order=True)


def test_parameters_at_sharded_indices():
    check_function(
        lambda x, table: table[(x[:, 0] * 10).long() % 7] ** 2 + table[ROWS].sum(),
        randn(*SHAPE), [randn(7, 2, seed=1)], POINTS["2x1x1"], second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_filled_with_a_learned_value(points):
    check_function(
        lambda x, v: x.index_fill(2, ROWS, v) + (x * x).index_fill_(1, ROWS[1:], v * v),
        randn(*SHAPE), [randn(1, seed=1)[0]], points, second_order=True,
    )  # fmt: skip


DIFFERENT = {
    "test elements": lambda x, rank: torch.isin(x, torch.tensor([1.0, rank])),
    "points": lambda x, rank: x.tensor_split(torch.tensor([1, 2 + rank]), 1),
    "a mask": lambda x, rank: x.masked_select(torch.tensor([True, rank == 0, True])),
    "bins": lambda x, rank: x.histogram(torch.tensor([0, 1.0 + rank], dtype=x.dtype)),
    "an index beside a mask": lambda x, rank: x[x[:, 0, 0, 0, 0] > 0, torch.tensor([rank])],
    "a number of repeats": lambda x, rank: x.repeat_interleave(torch.tensor([1 + rank]), 1),
    "numbers of repeats": lambda x, rank: x.repeat_interleave(torch.tensor([1, 2, rank]), 1),
    "a fill": lambda x, rank: x.index_fill(1, ROWS[1:], torch.tensor(1.0 + rank).double()),
}


@pytest.mark.parametrize("call", DIFFERENT.values(), ids=DIFFERENT)
def test_plain_operands_that_differ_between_ranks_are_named(call):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(UsageError, match=r"differs between the ranks|different calls"):
            call(x.detach(), mesh.rank)

    on_ranks((2, 1, 1), body)


def test_a_call_that_gathers_fills_no_other_tensor():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"])).detach()
        with pytest.raises(NotSupported, match="out= would fill a gathered copy"):
            torch.masked_select(x, x > 0, out=x.clone())

    on_ranks((2, 1, 1), body)


def test_arrays_and_copies():
    whole = randn(*SHAPE)

    def body(mesh):
        x = shard(whole, layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        assert np.array_equal(x.detach().numpy(), whole.numpy())
        assert np.array_equal(np.asarray(x.detach()), whole.numpy())
        y = copy.copy(x)
        assert (y.is_leaf, y.requires_grad, y.layout) == (True, True, x.layout)
        with torch.no_grad():
            y.add_(1)
        assert torch.equal(x, whole + 1)  # as in torch, it shares memory
        assert not torch.equal(x, y + 1e-9)
        assert torch.allclose(x, y + 1e-9)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)])
def test_arrays_are_read_only_however_the_tensor_is_cut(spatial):
    def body(mesh):
        x = distribute_tensor(randn(1, 2, 4, 3, 3), mesh)
        arrays = x.numpy(), np.asarray(x), x.sum((2, 3, 4)).numpy()
        for array in arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 5
        with pytest.raises(ValueError, match="read-only"):
            np.maximum(x.numpy(), 0, out=x.numpy())
        own = x.numpy().copy()
        own[...] = 5
        assert torch.equal(x.full_tensor(), randn(1, 2, 4, 3, 3))

    on_ranks(spatial, body)


def test_a_mask_of_another_shape_is_named():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(IndexError):
            x[x[:, :, 1:] > 0]
        with pytest.raises((IndexError, UsageError)):
            x[:, torch.ones(4, dtype=torch.bool)]
        for mask in ((x > 0)[:, :1], (x > 0)[:, :, :2], (x > 0)[0], x[None] > 0):
            with pytest.raises(IndexError, match="The shape of the mask"):
                x.detach()[mask] = 2.0
        assert torch.equal(x.full_tensor(), randn(*SHAPE))

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("dim", [1, 2])
def test_index_select_refuses_what_torch_refuses(dim):
    wrong = {
        "is negative": torch.tensor([0, -1]),
        "Expected dtype int32 or int64": torch.tensor([True, False, True, True, False]),
        "supposed to be a vector": torch.tensor([[0, 1], [2, 1]]),
    }

    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        for message, index in wrong.items():
            with pytest.raises((IndexError, RuntimeError)):
                randn(*SHAPE).index_select(dim, index)
            with pytest.raises((IndexError, RuntimeError), match=message):
                x.index_select(dim, index)
        assert x.index_select(dim, torch.tensor(1, dtype=torch.int32)).shape[dim] == 1

    on_ranks((2, 1, 1), body)
