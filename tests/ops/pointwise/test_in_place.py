"""In-place calls on plain tensors with sharded arguments: the object becomes sharded or filled."""

from __future__ import annotations

import operator
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from pydist import ShardedTensor
from pydist.errors import NotSupported
from support.equivalence import (
    FP64_BOUND,
    check_function,
    error,
    layout_at,
    on_ranks,
    randint,
    randn,
    shard,
)
from support.equivalence.splits import SHAPE, TWO_SPLITS

POINTS = TWO_SPLITS["2x2x2, half of them empty"]


def _sum(plain, x):
    plain.add_(x)
    plain.mul_(2)
    return plain + x


CALLS = {
    "add_": lambda x: torch.zeros(SHAPE).double().add_(x),
    "+=": lambda x: operator.iadd(torch.ones(SHAPE).double(), x),
    "twice": lambda x: _sum(torch.ones(SHAPE).double(), x),
    "copy_": lambda x: torch.empty(SHAPE).double().copy_(x * x),
    "mul_ by a slice": lambda x: torch.ones(SHAPE).double().mul_(x.mean((2, 3), keepdim=True)),
    "masked_fill_": lambda x: torch.ones(SHAPE).double().masked_fill_(x > 0, 3.0) * x,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_on_the_whole(call):
    check_function(call, randn(*SHAPE), (), POINTS)


def test_of_a_plain_tensor_with_a_gradient():
    check_function(lambda x, p: (p * 2).add_(x * x) * p, randn(*SHAPE), [randn(*SHAPE)], POINTS)


def test_the_object_is_the_same_for_all_who_hold_it():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS))
        total = torch.zeros(SHAPE).double()
        held = [total]
        identity = id(total)
        total += x
        assert isinstance(held[0], ShardedTensor)
        assert id(total) == identity
        assert torch.equal(held[0].full_tensor(), randn(*SHAPE))
        total.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.ones(SHAPE).double())

    on_ranks((2, 2, 2), body)


def _viewed():
    plain = torch.zeros(SHAPE).double()
    return plain, plain[0]


def _weakly():
    plain = torch.zeros(SHAPE).double()
    return plain, weakref.ref(plain)


def _with(share):
    plain = torch.zeros(SHAPE).double()
    return plain, share(plain)


REFUSED = {
    "a view": (lambda: (torch.zeros(SHAPE).double()[:], None), "a view of another"),
    "with views": (_viewed, "there are views"),
    "with weak references": (_weakly, "weak references"),
    "a parameter": (lambda: (nn.Parameter(torch.zeros(SHAPE).double()), None), "a Parameter"),
    "a leaf": (lambda: (torch.zeros(SHAPE).double().requires_grad_(), None), "a leaf"),
    "data of another": (lambda: _with(lambda t: t.data), "something else sees"),
    "a NumPy array": (lambda: _with(lambda t: t.numpy()), "something else sees"),
    "of a NumPy array": (lambda: (torch.from_numpy(np.zeros(SHAPE)), None), "something else sees"),
}


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_refused_where_others_see_the_memory(make, why):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS))
        plain, other = make()
        with pytest.raises(NotSupported, match=why):
            plain.add_(x)
        assert not isinstance(plain, ShardedTensor)
        assert not plain.any()
        del other

    on_ranks((2, 2, 2), body)


FILLS = {
    "add_": lambda t, x: t.add_(x),
    "copy_": lambda t, x: t.copy_(x),
    "[]=": lambda t, x: operator.setitem(t, (slice(None), 1), x[:, 1]),
    "[mask]=": lambda t, x: operator.setitem(t, x > 0, 2.0),
    "index_add_": lambda t, x: t.index_add_(2, torch.tensor([1, 0]), x[:, :, :2]),
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("case", [case for case in REFUSED if case != "a leaf"])
def test_without_gradient_others_see_the_full_result(case, fill):
    """As a parameter's `.data`, from statistics by channels that a view has cut."""
    expected = torch.zeros(SHAPE).double()
    fill(expected, randn(*SHAPE))

    @torch.no_grad()
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS))
        plain, other = REFUSED[case][0]()
        fill(plain, x)
        assert torch.equal(plain, expected)
        assert not isinstance(plain, ShardedTensor)
        assert not isinstance(other, torch.Tensor) or other.any()

    on_ranks((2, 2, 2), body)


@pytest.mark.parametrize("rank", [0, 7])
def test_memory_that_one_rank_alone_sees_elsewhere(rank):
    """As by a program that logs on one rank. All ranks do the same."""

    @torch.no_grad()
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS))
        plain = torch.zeros(SHAPE).double()
        held = plain.numpy() if mesh.rank == rank else None
        plain.add_(x)
        assert torch.equal(plain, randn(*SHAPE))
        assert not isinstance(plain, ShardedTensor)
        assert held is None or held.any()

    on_ranks((2, 2, 2), body)


STATISTICS = {
    "data": lambda s, m: s.data.copy_(m),
    "running mean": lambda s, m: s.data.mul_(0.9).add_(0.1 * m),
    "lerp_": lambda s, m: s.data.lerp_(m, 0.1),
    "detach": lambda s, m: s.detach().add_(m),
    "twice": lambda s, m: s.data.add_(m).mul_(2).add_(m),
    "assigned": lambda s, m: operator.setitem(s.data, slice(None), m),
    "assigned at a mask": lambda s, m: operator.setitem(s.data, m > 0, 2),
    "array": lambda s, m: torch.from_numpy(s.numpy()).sub_(m),
}
OF_DETACHED = {
    "copy_": lambda s, m: s.copy_(m),
    "+=": operator.iadd,
    "view": lambda s, m: s.view(3, 1).copy_(m.unsqueeze(1)),
    "a part": lambda s, m: operator.setitem(s, slice(1, 2), m[1:2]),
}


@pytest.mark.parametrize("change", STATISTICS.values(), ids=STATISTICS)
@pytest.mark.parametrize("trains", [False, True])
def test_statistics_reach_the_memory_that_a_buffer_shares(change, trains):
    _check_statistic(change, trains)


@pytest.mark.parametrize("change", OF_DETACHED.values(), ids=OF_DETACHED)
def test_statistics_without_gradient_reach_the_memory_of_a_buffer(change):
    _check_statistic(change, False)


def _check_statistic(change, trains):
    whole, expected = randn(*SHAPE), torch.full((3,), 0.5).double()
    change(expected, whole.mean((0, 2, 3, 4)))

    def body(mesh):
        buffer = torch.full((3,), 0.5).double()
        x = shard(whole, layout_at(mesh, SHAPE, POINTS)).detach().requires_grad_(trains)
        change(buffer, x.mean((0, 2, 3, 4)))
        assert type(buffer) is torch.Tensor
        assert not buffer.requires_grad
        assert error(buffer, expected) <= FP64_BOUND

    on_ranks((2, 2, 2), body)


@pytest.mark.parametrize("value", [lambda x: x.mean((0, 2, 3, 4)), lambda x: x[0, 0]])
def test_a_parameter_gets_the_values_of_a_sharded_tensor_as_its_data(value):
    """The interpreter would end at a later use of the parameter."""
    expected = value(randn(*SHAPE))

    def body(mesh):
        p = nn.Parameter(torch.zeros_like(expected))
        p.data = value(shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS)))
        assert type(p) is nn.Parameter
        p.square().sum().backward()
        for found, by in ((p.detach(), 1), (p.grad, 2)):
            assert error(found, by * expected) <= FP64_BOUND

    on_ranks((2, 2, 2), body)


def test_the_gradient_of_a_statistic_stays_with_the_object():
    def loss(x, p):
        s = torch.ones(3).double()
        kept = s.data
        s += x.mean((0, 2, 3, 4)) * p
        return (x * s.view(1, 3, 1, 1, 1) * kept.view(1, 3, 1, 1, 1)).sum()

    check_function(loss, randn(*SHAPE), [randn(3)], POINTS)


def test_a_shape_that_would_grow_is_torchs_error():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS))
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            torch.zeros(3).double().add_(x)

    on_ranks((2, 2, 2), body)


def _one_hot(labels):
    plain = torch.zeros((2, 4, 5, 4, 3))
    return plain.scatter_(dim=1, index=labels.long(), value=1)


LABELS = randint(4, 2, 1, 5, 4, 3)
SCATTERS = {
    "one-hot as MONAI makes it": _one_hot,
    "scatter": lambda x: torch.zeros(2, 4, 5, 4, 3).scatter(1, x, 2.0),
    "into a sharded one": lambda x: x.scatter(1, x * 0, x + 1),
    "add": lambda x: torch.zeros(2, 4, 5, 4, 3).scatter_add(1, x, x * 0.5),
    "F.one_hot": lambda x: nn.functional.one_hot(x, 5),
    "F.one_hot by itself": nn.functional.one_hot,
    "bincount": lambda x: torch.bincount(x.flatten(), minlength=3),
    "bincount of weights": lambda x: torch.bincount(x[0, 0, :, 0, 0], torch.arange(5.0)),
    "isin": lambda x: torch.isin(x, torch.tensor([1, 3])),
}


@pytest.mark.parametrize("call", SCATTERS.values(), ids=SCATTERS)
def test_labels(call):
    check_function(call, LABELS, (), POINTS)


def test_the_gradient_of_a_scatter():
    check_function(
        lambda x, p: (p * 1).scatter_(1, (x > 0).long()[:, :1], x[:, 1:2] * x[:, :1]),
        randn(*SHAPE), [randn(*SHAPE, seed=1)], POINTS, second_order=True,
    )  # fmt: skip


def test_scatter_along_a_split_dim_of_a_plain_tensor():
    check_function(lambda x: torch.zeros(2, 1, 5, 4, 3).scatter_(2, x, 1.0), LABELS, (), POINTS)
