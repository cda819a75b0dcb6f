"""Zeros of torch's double backward formulas, which have no memory, on some ranks alone."""

from __future__ import annotations

import pytest
import torch
from equivalence import randn
from scripts import check_script, copy_of
from torch import nn

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


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_zeros_without_memory_reach_every_layer(layer):
    """The second derivative of |y|."""

    def script(ready, cut):
        model = ready(copy_of(nn.Sequential(nn.Conv3d(2, 4, 1), layer())))
        y = model(cut(randn(2, 2, 6, 4, 3)))
        first = list(model[0].parameters())
        found = torch.autograd.grad(y.abs().mean(), first, create_graph=True)
        sum(g.square().sum() for g in found).backward()
        return [*found, *(p.grad for p in model.parameters())]

    check_script(script)


def test_zeros_without_memory_are_gradients():
    """Of a parameter, and of a sharded tensor with which sharded calls go on."""

    def script(ready, cut):
        model = ready(copy_of(nn.Sequential(nn.Conv3d(2, 3, 3, padding=1))))
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
