"""Weights that change without autograd between forward and backward: gradients are torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import distribute_tensor, parallelize
from pydist.errors import UsageError
from pydist.ops.norm import norm_common
from support.equivalence import (
    assert_same,
    even_points,
    layout_at,
    on_ranks,
    randn,
    shard,
    whole_of,
)


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
    "other memory": lambda p: setattr(p, "data", p.data * 0.5),
}


class Scaled(nn.Module):
    """Parameter for each channel and depth position, multiplied by torch itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(randn(2, 6, 1, 1))

    def forward(self, x):
        return (x * self.scale).tanh()


class Places(nn.Module):
    """Layer norm over the channels."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        return self.norm(x.movedim(1, -1)).movedim(-1, 1).tanh()


OTHERS = {
    "product": ([Scaled(), conv()], (2, 2, 6, 4, 4), (2, 1, 1)),
    "layer norm": ([Places(), conv()], (2, 2, 6, 4, 4), (2, 1, 1)),
    "conv 1d": ([nn.Conv1d(2, 3, 3), nn.Tanh()], (2, 2, 9), (1, 1, 1)),
    "transposed 1d": ([nn.ConvTranspose1d(2, 3, 3, 2), nn.Tanh()], (2, 2, 9), (1, 1, 1)),
    "conv 1d, split": ([nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 1, 3)], (2, 2, 9), (2, 1, 1)),
    "conv 2d": ([nn.Conv2d(2, 3, 3), nn.PReLU(), nn.Conv2d(3, 1, 1)], (2, 2, 9, 3), (2, 1, 1)),
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
        points = [even_points(n, k) for n, k in zip(shape[2:], spatial, strict=False)]
        x = shard(randn(*shape), layout_at(mesh, shape, points))
        return gradients(own, x, change, checkpointed)

    for found in on_ranks(spatial, rank):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_weights(layers, change, monkeypatch):
    monkeypatch.setattr(norm_common, "_WORTH_A_PASS", 0)
    compared(layers, (2, 2, 6, 4, 4), change, (2, 1, 1))


@pytest.mark.parametrize(("layers", "shape", "spatial"), OTHERS.values(), ids=OTHERS)
def test_other_memory_for_other_weights(layers, shape, spatial):
    compared(layers, shape, CHANGES["other memory"], spatial)


def test_other_memory_to_second_order_and_in_a_second_forward():
    def grads(model, x):
        y = model(x.requires_grad_())
        for p in model.parameters():
            p.data = p.data * 0.5
        (g,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
        (g.square().sum() + model(x).sin().mean()).backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(3)
    model = nn.Sequential(conv(), nn.Tanh(), conv(3)).double()
    expected = grads(copy.deepcopy(model), randn(1, 2, 6, 3, 3))

    def rank(mesh):
        x = distribute_tensor(randn(1, 2, 6, 3, 3), mesh)
        return grads(parallelize(copy.deepcopy(model), mesh), x)

    for found in on_ranks((2, 1, 1), rank):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_another_dtype_between_forward_and_backward_is_refused():
    def rank(mesh):
        model = parallelize(nn.Sequential(conv()).double(), mesh)
        y = model(distribute_tensor(randn(1, 2, 6, 3, 3), mesh)).square().mean()
        model.float()
        with pytest.raises(UsageError, match="between forward and backward"):
            y.backward()

    on_ranks((2, 1, 1), rank)


# Whether the weights train in forward, in the pass with create_graph, in the last pass.
MOMENTS = {
    "frozen before the penalty": (True, False, False),  # found by seed 4001182
    "frozen for the penalty": (True, False, True),
    "frozen after the penalty": (True, True, False),
    "unfrozen before the penalty": (False, True, True),
    "unfrozen for the penalty": (False, True, False),
    "unfrozen after the penalty": (False, False, True),
}


def penalty(model, x, moments, checkpointed=False):
    """Returns the gradients of a penalty, then those of an ordinary step."""
    trains = iter(moments)
    model.requires_grad_(next(trains))
    x.requires_grad_()
    y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    loss = y.sin().mean()
    model.requires_grad_(next(trains))
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    model.requires_grad_(next(trains))
    (g.square().sum() + loss).backward()
    model.requires_grad_(True)
    found = [g, x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    model(x).square().mean().backward()
    found += [p.grad for p in model.parameters()]
    return [whole_of(t) for t in found]


def check_penalty(name, moments, spatial, checkpointed=False):
    layers, shape = MODELS.get(name) or OTHERS[name][0], (1, 2, 6, 4, 4)
    if name not in MODELS:
        shape = OTHERS[name][1]
    model = nn.Sequential(*copy.deepcopy(layers)).double()
    expected = penalty(copy.deepcopy(model), randn(*shape), moments, checkpointed)

    def rank(mesh):
        points = [even_points(n, k) for n, k in zip(shape[2:], spatial, strict=False)]
        x = shard(randn(*shape), layout_at(mesh, shape, points))
        return penalty(parallelize(copy.deepcopy(model), mesh), x, moments, checkpointed)

    for found in on_ranks(spatial, rank):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("name", [*MODELS, "product", "layer norm", "conv 2d"])
def test_weights_that_are_frozen_or_unfrozen_around_a_penalty(name, moments, monkeypatch):
    monkeypatch.setattr(norm_common, "_WORTH_A_PASS", 0)
    check_penalty(name, moments, (2, 1, 1))


@pytest.mark.parametrize("name", ["conv", "norm, PReLU", "conv 1d", "transposed 1d"])
def test_weights_that_are_frozen_before_a_penalty_on_one_rank(name):
    check_penalty(name, MOMENTS["frozen before the penalty"], (1, 1, 1))


@pytest.mark.parametrize("moments", [(True, False, False), (False, True, True)], ids=str)
@pytest.mark.parametrize("name", ["conv", "transposed"])
def test_weights_that_are_frozen_or_unfrozen_before_a_checkpoint_is_computed_again(name, moments):
    check_penalty(name, moments, (2, 1, 1), checkpointed=True)


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
        assert_same(found, expected)
