"""Activation checkpoints within checkpoints: results and gradients of first and second order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pydist import distribute_tensor, parallelize
from support.equivalence import Cut, check_function, on_ranks, randn

POINTS = {
    "3x1x1": [[0, 3, 4, 7], None, None],
    "2x2x2, half of them empty": [[0, 3, 7], [0, 1, 5], [0, 0, 4]],
}
X, W, V = randn(2, 3, 7, 5, 4), randn(4, 3, 3, 3, 3, seed=1) / 9, randn(3, 4, 3, 3, 3, seed=2) / 9


def again(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def deep(x, w, v):
    """Two checkpoints in one: the ReLU before the second is deferred until it is entered."""

    def first(x):
        return F.instance_norm(F.conv3d(x, w, padding=1))

    def second(y, x):
        return F.conv3d(y, v, padding=1) * x

    def both(x):
        y = again(first, x)
        return again(second, F.relu(y), x).sin()

    return again(both, x) + x


def thrice(x, w, v):
    """A checkpoint in two others, of tensors that were changed in place before."""

    def inner(x):
        return F.conv3d(x, w, padding=1).tanh_()

    def middle(x):
        return F.conv3d(again(inner, (x + 1).mul_(2)), v, padding=1)

    return again(lambda x: again(middle, x * 1.5) * x, x)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("function", [deep, thrice])
def test_functions(function, points):
    check_function(function, X, [W, V], points, second_order=True)


@pytest.mark.parametrize("early_stop", [True, False])
def test_several_arguments_and_one_without_gradient(early_stop):
    def inner(x, y, plain):
        return F.conv3d(x * y, W, padding=1) * plain

    def outer(x, y, plain):
        plain = plain.exp()
        return again(inner, x.exp(), y.detach(), plain) + again(inner, x, y, plain)

    def function(x, y, plain):
        with set_checkpoint_early_stop(early_stop):
            return again(outer, x, y, plain)

    cut = POINTS["3x1x1"]
    others = [Cut(randn(*X.shape, seed=3), cut)]
    check_function(function, X, [randn(1, 4, 1, 1, 1, seed=4)], cut, beside=others)


class Net(nn.Module):
    """A network with batch norm and dropout in checkpointed blocks of a checkpointed body."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Conv3d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Dropout(0.3))
            for _ in range(2)
        )
        self.nested = True

    def body(self, x):
        x = self.entry(x).relu()
        for block in self.blocks:
            x = x + (again(block, x) if self.nested else block(x))
        return x

    def forward(self, x):
        return again(self.body, x) if self.nested else self.body(x)


def test_a_network_draws_the_same_masks():
    torch.manual_seed(0)
    made = Net().double()

    def gradients(mesh, nested):
        model = copy.deepcopy(made)
        model.nested = nested
        parallelize(model, mesh)
        model(distribute_tensor(randn(2, 2, 7, 5, 4), mesh)).square().mean().backward()
        return [p.grad for p in model.parameters()]

    nested, plain = (
        on_ranks((3, 1, 1), lambda mesh, nested=nested: gradients(mesh, nested))
        for nested in (True, False)
    )
    for mine, other in zip(nested, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_memory_of_a_nested_checkpoint_is_not_kept():
    """What the recomputation of a checkpoint saves goes when backward has used it."""
    import gc
    import weakref

    saved: list[weakref.ref[torch.Tensor]] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.clone()
            saved.append(weakref.ref(y.untyped_storage()))
            ctx.save_for_backward(y)
            return y.sum()

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return torch.ones_like(y) * grad

    def inner(x):
        return x.sin() + Noted.apply(x.to_local())

    def body(mesh):
        x = distribute_tensor(X.clone(), mesh)
        x.requires_grad_()
        loss = again(lambda x: again(inner, x.cos()), x).sum()
        gc.collect()
        alive = sum(ref() is not None for ref in saved)
        assert alive == 0
        loss.backward()

    on_ranks((1, 1, 1), body)
