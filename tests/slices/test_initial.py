"""Initialization of sharded weights after `parallelize`: that of the whole network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pydist
from pydist.errors import NotSupported
from support.equivalence import on_ranks, randn

LAYER = nn.Sequential(nn.Conv3d(2, 6, 3)).double()
CALLS = {
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "constant": lambda layer: nn.init.constant_(layer.weight, 0.5),
    "ones": lambda layer: nn.init.ones_(layer.weight),
    "uniform": lambda layer: nn.init.uniform_(layer.weight, -1, 2),
    "normal": lambda layer: nn.init.normal_(layer.weight, std=0.02),
    "xavier_uniform": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "xavier_normal": lambda layer: nn.init.xavier_normal_(layer.weight, 2),
    "kaiming_uniform": lambda layer: nn.init.kaiming_uniform_(layer.weight, mode="fan_out"),
    "kaiming_normal": lambda layer: nn.init.kaiming_normal_(layer.weight, nonlinearity="relu"),
    "dirac": lambda layer: nn.init.dirac_(layer.weight),
    "normal of data": lambda layer: nn.init.normal_(layer.weight.data, 0.0, 0.02),
    "method of data": lambda layer: layer.weight.data.uniform_(-1, 1),
    "rows of data": lambda layer: layer.weight.data.flatten(1).normal_(),
    "channels last": lambda layer: (
        layer.to(memory_format=torch.channels_last_3d) and nn.init.normal_(layer.weight)
    ),
    "exponential": lambda layer: layer.weight.data.exponential_(),
}


@pytest.mark.parametrize("shares", [None, (2, 1)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_slices_are_those_of_the_whole_weight(call, shares):
    torch.manual_seed(5)
    alone = copy.deepcopy(LAYER)
    call(alone[0])

    def body(mesh):
        model = pydist.parallelize(copy.deepcopy(LAYER), mesh, sharded_weights=True)
        for rank in range(mesh.size):  # one after the other, as threads have one generator
            if rank == mesh.rank:
                torch.manual_seed(5)
                call(model[0])
            mesh.world.barrier()
        assert torch.equal(model[0].weight.full_tensor(), alone[0].weight)
        assert torch.equal(model[0].bias, alone[0].bias)

    given = {} if shares is None else {"shares": {"channel": shares}}
    on_ranks((1, 1, 1), body, axes={"channel": 2}, **given)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_one_channel_has_the_order_of_its_format(memory_format):
    layer = nn.ConvTranspose3d(4, 3, 2)

    def drawn(weight):
        return nn.init.uniform_(weight, -1, 1, torch.Generator().manual_seed(5))

    def body(mesh):
        model = pydist.parallelize(
            nn.Sequential(copy.deepcopy(layer)), mesh, sharded_weights=True
        ).to(memory_format=memory_format)
        return drawn(model[0].weight).full_tensor().detach()

    expected = drawn(copy.deepcopy(layer).to(memory_format=memory_format).weight).detach()
    for found in on_ranks((1, 1, 1), body, axes={"channel": 2}):
        assert torch.equal(found, expected)


def test_weights_that_were_assigned():
    def body(mesh):
        layer = pydist.parallelize(nn.Sequential(nn.Linear(6, 8)), mesh, sharded_weights=True)[0]
        layer.weight.data = torch.zeros(8, 6)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))
        return layer.weight.full_tensor().detach()

    expected = torch.empty(8, 6).normal_(generator=torch.Generator().manual_seed(5))
    for found in on_ranks((1, 1, 1), body, axes={"channel": 2}):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [nn.Linear(6, 8), nn.Linear(8, 6), nn.Conv3d(2, 6, 3)])
def test_orthogonal(layer):
    def drawn(weight):
        return nn.init.orthogonal_(weight, 2.0, torch.Generator().manual_seed(5))

    def body(mesh):
        model = nn.Sequential(copy.deepcopy(layer))
        weight = pydist.parallelize(model, mesh, sharded_weights=True)[0].weight
        return drawn(weight).full_tensor().detach()

    expected = drawn(copy.deepcopy(layer).weight).detach()
    for found in on_ranks((1, 1, 1), body, axes={"channel": 2}):
        assert torch.equal(found, expected)


def test_parts_of_weights_are_not_drawn():
    def body(mesh):
        layer = pydist.parallelize(nn.Sequential(nn.Linear(6, 8)), mesh, sharded_weights=True)[0]
        for view in (lambda w: w.T, lambda w: w[:, :2]):
            with pytest.raises(NotSupported, match="view of a part of a weight; draw all of it"):
                view(layer.weight.data).normal_()
        with pytest.raises(NotSupported, match="its arguments are sharded"):
            layer.weight.data.bernoulli_(layer.weight.data)

    on_ranks((1, 1, 1), body, axes={"channel": 2})


def test_other_tensors_are_not_drawn():
    def body(mesh):
        x = pydist.distribute_tensor(randn(2, 2, 4, 4, 4), mesh)
        pydist.parallelize(copy.deepcopy(LAYER), mesh, sharded_weights=True)
        for call in (nn.init.normal_, torch.Tensor.uniform_):
            with pytest.raises(NotSupported, match=r"it is no weight; torch\.rand_like"):
                call(x)

    on_ranks((1, 1, 1), body, axes={"channel": 2})
