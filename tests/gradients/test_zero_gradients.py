"""Zeros without memory from torch's double backward formulas, on some ranks alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.equivalence import assert_same, on_ranks, randn, whole_of
from support.equivalence.scripts import check_script, on_mesh
from support.networks.small import initialized

LAYERS = {
    "halo": lambda: nn.Conv3d(4, 3, 3, padding=1),
    "strided": lambda: nn.Conv3d(4, 3, 3, padding=1, stride=2),
    "local": lambda: nn.Conv3d(4, 3, 1),
    "transposed": lambda: nn.ConvTranspose3d(4, 3, 3, stride=2, padding=1),
    "local transposed": lambda: nn.ConvTranspose3d(4, 3, 2, stride=2),
    "average": lambda: nn.AvgPool3d(3, stride=2, padding=1),
    "maximum": lambda: nn.MaxPool3d(3, stride=2, padding=1),
    "norm": lambda: nn.BatchNorm3d(4),
    "norm, prelu": lambda: nn.Sequential(nn.BatchNorm3d(4), nn.PReLU()),
    "norm, relu": lambda: nn.Sequential(nn.BatchNorm3d(4), nn.ReLU()),
    "relu, average": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.AvgPool3d(2)),
    "conv, relu": lambda: nn.Sequential(nn.Conv3d(4, 3, 3, padding=1), nn.ReLU(inplace=True)),
}


def rounding(layer):
    """Returns the bound on zero gradients; in norms, terms up to thousands cancel to them."""
    return 1e-11 if layer.startswith("norm") else 0.0


@pytest.mark.parametrize("layer", LAYERS)
def test_zeros_without_memory_reach_every_layer(layer):
    """The zeros come from the second derivative of |y|."""

    def script(ready, cut):
        model = ready(initialized(nn.Sequential(nn.Conv3d(2, 4, 1), LAYERS[layer]())))
        y = model(cut(randn(2, 2, 6, 4, 3)))
        first = list(model[0].parameters())
        found = torch.autograd.grad(y.abs().mean(), first, create_graph=True)
        sum(g.square().sum() for g in found).backward()
        return [*found, *(p.grad for p in model.parameters())]

    check_script(script, zero=rounding(layer))


def test_zeros_without_memory_are_gradients():
    """They are gradients of a parameter, and of a sharded tensor that later calls use."""

    def script(ready, cut):
        model = ready(initialized(nn.Sequential(nn.Conv3d(2, 3, 3, padding=1))))
        weight, x = model[0].weight, cut(randn(2, 2, 6, 4, 3)).requires_grad_()
        (g,) = torch.autograd.grad((weight * 2).abs().sum(), weight, create_graph=True)
        (gx,) = torch.autograd.grad((x * 2).abs().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(gx.sum(), x, retain_graph=True)
        seen = []
        x.register_hook(lambda grad: seen.append(model(grad).sum()) and None)
        (gx.sum() + g.sum()).backward()
        found = [weight.grad.clone(), *seen]
        model.zero_grad()  # torch can't add to them
        (model(again).sum() + model(x.grad).sum()).backward()
        return [*found, *(p.grad for p in model.parameters())]

    check_script(script)


class Scaled(nn.Module):
    """Parameter for each depth position, multiplied by torch itself."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(randn(6, 1, 1)), nn.Parameter(randn(6, 1, 1))

    def forward(self, x):
        return x * self.scale + self.shift


class Head(nn.Module):
    """Plain layer after `full_tensor()`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        means = x.mean((2, 3, 4))
        return self.linear(whole_of(means))


NAMED = {
    **LAYERS,
    "product": Scaled,
    "plain head": Head,
    "adaptive maximum": lambda: nn.AdaptiveMaxPool3d(1),
}


def penalty(loss, layer, prepared=lambda model: None):
    def script(ready, cut):
        model = ready(initialized(nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), NAMED[layer]())))
        prepared(model)
        x = cut(randn(2, 2, 6, 4, 3)).requires_grad_()
        found = torch.autograd.grad(loss(model(x)), [x, model[0].weight], create_graph=True)
        squares = sum(g.square().sum() for g in found)
        asked = [x, *model.parameters()]
        second = torch.autograd.grad(squares, asked, retain_graph=True, allow_unused=True)
        squares.backward()
        last = [x.grad, *(p.grad for p in model.parameters())]
        shown = [*found, *second, *last]
        return [whole_of(t) for t in shown]

    return script


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.abs().mean()], ids=["linear", "abs"])
@pytest.mark.parametrize("layer", NAMED)
def test_no_gradient_is_none_and_not_zeros(layer, loss):
    """Optimizers skip a parameter without a gradient; with a zero gradient they decay it."""
    check_script(penalty(loss, layer), zero=rounding(layer))


@pytest.mark.parametrize("name", ["halo", "average", "plain head"])
def test_a_hook_on_one_rank_makes_zeros_of_none_there_and_changes_no_exchange(name):
    """torch's own function for module hooks creates the zeros."""
    expected = penalty(torch.sum, name)(lambda module: module, lambda x: x)

    def rank(mesh):
        def hooked(model):
            if mesh.rank == 1:
                model[1].register_full_backward_hook(lambda *_: None)

        return on_mesh(penalty(torch.sum, name, hooked), mesh)

    for found in on_ranks((2, 1, 1), rank):
        for a, b in zip(found, expected, strict=True):
            if b is not None:
                assert_same([a], [b])
            else:
                assert a is None or not a.any()
