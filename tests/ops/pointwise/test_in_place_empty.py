"""In-place calls on empty shards: double backward reaches the calls before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from support.equivalence import check_function, layout_at, on_ranks, randn, shard


def unpooled(x):
    y, places = F.max_pool3d(x, 2, return_indices=True)
    return F.max_unpool3d(y, places, 2, output_size=x.shape)


# Their shards are views.
RESULTS = {
    "unpool": unpooled,
    "linear": lambda x: F.linear(x.movedim(1, -1), randn(2, 1)).movedim(-1, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
}


def halved_past_autograd(y):
    with torch.no_grad():
        y.mul_(0.5)
    assert y.requires_grad
    assert (y.select(-1, 0) * 1).requires_grad
    return y


ACTS = {
    "leaky_relu_": lambda y: F.leaky_relu_(y, 0.1),
    "mul_": lambda y: y.mul_(2),
    "no_grad": halved_past_autograd,
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_to_second_order(result, act):
    def function(x):
        y = act(result(F.avg_pool3d(x * x, (3, 1, 1), 1, (1, 0, 0))))
        return F.conv3d(y, randn(1, y.shape[1], 3, 3, 3), padding=1)

    points = [(0, 1, 2, 8, 8), None, None]
    check_function(function, randn(1, 1, 8, 2, 2), (), points, second_order=True)


def assigned(y, x):
    y[:, 0] = 0.5


def added_to_a_part(y, x):
    y[:, :1] += x


def changed_as_a_view(y, x):
    y[:, :1].mul_(x)


INDEX = torch.tensor([0])
CHANGES = {
    "add_": lambda y, x: y.add_(x),
    "zero_": lambda y, x: y.zero_(),
    "dropout": lambda y, x: F.dropout(y, 1.0, inplace=True),
    "twice": lambda y, x: y.mul_(x).add_(x),
    "assigned": assigned,
    "added to a part": added_to_a_part,
    "changed as a view": changed_as_a_view,
    "scatter_": lambda y, x: y.scatter_(1, torch.zeros_like(x, dtype=torch.int64), x),
    "scatter_ of a number": lambda y, x: y.scatter_(1, INDEX.expand(1, 1, 8, 2, 2), 0.5),
    "index_fill_": lambda y, x: y.index_fill_(1, INDEX, 0.5),
    "index_add_": lambda y, x: y.index_add_(1, INDEX, x),
    "index_copy_": lambda y, x: y.index_copy_(1, INDEX, randn(1, 1, 8, 2, 2)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_with_other_operands(change):
    def function(x):
        y = RESULTS["linear"](F.avg_pool3d(x * x, (3, 1, 1), 1, (1, 0, 0)))
        before = y.movedim(1, -1)
        change(y, F.avg_pool3d(x.sin(), (3, 1, 1), 1, (1, 0, 0)))
        return F.conv3d(y, randn(1, 2, 3, 3, 3), padding=1) + before.square().sum(-1).sin()

    points = [(0, 1, 2, 8, 8), None, None]
    check_function(function, randn(1, 1, 8, 2, 2), (), points, second_order=True)


@pytest.mark.parametrize("change", ["zero_", "add", "copy_", "read later"])
def test_a_part_that_another_rank_has_is_changed_under_no_grad(change):
    """The empty view there has no node, which torch would refuse to make after the change."""
    shape = (1, 1, 8, 2, 2)

    def body(mesh):
        x = shard(randn(*shape), layout_at(mesh, shape, [(0, 4, 8), None, None]))
        assert x.requires_grad
        with torch.no_grad():
            part = x[:, :, :3]
            if change == "zero_":
                part.zero_()
            elif change == "add":
                x[:, :, :3] += 1
            elif change == "copy_":
                part.copy_(torch.ones(1, 1, 3, 2, 2, dtype=x.dtype))
            else:
                x.mul_(2)
            return part.sum(), x.detach().full_tensor()

    first, second = on_ranks((2, 1, 1), body)
    expected = randn(*shape)
    values = {"zero_": 0 * expected, "add": expected + 1, "copy_": 0 * expected + 1}
    expected[:, :, :3] = values.get(change, expected * 2)[:, :, :3]
    if change == "read later":
        expected *= torch.tensor([1, 1, 1, 2, 2, 2, 2, 2]).view(8, 1, 1)
    for total, whole in (first, second):
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(total, expected[:, :, :3].sum())
