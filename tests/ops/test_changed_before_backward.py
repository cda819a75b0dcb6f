"""Weights change past autograd between forward and backward: the gradients are torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from equivalence import on_ranks, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import distribute_tensor, parallelize
from pydist.ops.normalization import norm_common


def conv(channels=2):
    return nn.Conv3d(channels, 3, 3, padding=1)


MODELS = {
    "conv": [conv(), nn.ReLU(inplace=True), conv(3)],
    "transposed": [nn.ConvTranspose3d(2, 3, 3, 2, 1), nn.Tanh()],
    "instance norm": [conv(), nn.InstanceNorm3d(3, affine=True), nn.Tanh()],
    "norm, PReLU": [conv(), nn.InstanceNorm3d(3, affine=True), nn.PReLU(3)],
    "batch norm": [conv(), nn.BatchNorm3d(3), nn.PReLU()],
    "evaluated": [conv(), nn.BatchNorm3d(3).eval(), nn.PReLU()],
    "group norm": [conv(), nn.GroupNorm(3, 3), nn.Tanh()],
}
CHANGES = {
    "data": lambda p: p.data.mul_(0.5),
    "numpy": lambda p: p.detach().numpy().fill(0.3),
}


def gradients(model, x, change, checkpointed):
    y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    for p in model.parameters():
        change(p)
    y.square().mean().backward()
    return [p.grad for p in model.parameters()]


def compared(layers, shape, change, spatial, checkpointed=False):
    torch.manual_seed(3)
    model = nn.Sequential(*copy.deepcopy(layers)).double()
    expected = gradients(copy.deepcopy(model), randn(*shape), change, checkpointed)

    def rank(mesh):
        own = parallelize(copy.deepcopy(model), mesh)
        return gradients(own, distribute_tensor(randn(*shape), mesh), change, checkpointed)

    for found in on_ranks(spatial, rank):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_weights(layers, change, monkeypatch):
    monkeypatch.setattr(norm_common, "_WORTH_A_PASS", 0)
    compared(layers, (2, 2, 6, 4, 4), change, (2, 1, 1))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_of_an_instance_norm_of_one_sample_on_one_rank(checkpointed):
    compared(MODELS["instance norm"], (1, 2, 4, 3, 3), CHANGES["data"], (1, 1, 1), checkpointed)


@pytest.mark.parametrize("name", ["conv", "transposed"])
def test_a_checkpoint_computes_its_halos_again(name):
    compared([conv(), *MODELS[name][1:], conv(3)] if name == "conv" else
             [nn.Conv3d(2, 2, 3, padding=1), *MODELS[name], conv(3)],
             (1, 2, 6, 4, 4), CHANGES["data"], (2, 1, 1), checkpointed=True)  # fmt: skip


def test_sample_groups_of_one_and_of_several_samples_reach_parameters_in_one_order():
    torch.manual_seed(3)
    norm = nn.InstanceNorm3d(3, affine=True).double()
    x, weights = randn(3, 3, 2, 2, 2), randn(3, 3, 2, 2, 2, seed=1)

    def grads(model, x, weights):
        loss = (model(x) * weights).mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = grads(copy.deepcopy(norm), x, weights)

    def rank(mesh):
        mine = slice(0, 1) if mesh.data_index == 0 else slice(1, 3)
        own = parallelize(copy.deepcopy(norm), mesh)
        return grads(own, distribute_tensor(x[mine], mesh), weights[mine])

    for found in on_ranks((1, 1, 1), rank, data=2):
        torch.testing.assert_close(found, expected)
