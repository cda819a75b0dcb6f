"""Tests of sample groups of unequal size in real jobs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pydist import Mesh, parallelize, sum_over_groups
from support.equivalence import assert_same, randn

pytestmark = pytest.mark.ranks(2, mpi=("openmpi", "mpich"), seconds=120)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    first = nn.Conv3d(2, 4, 3, padding=1, bias=False)  # before a norm its gradient is noise
    return nn.Sequential(first, nn.BatchNorm3d(4), nn.Tanh(), nn.Conv3d(4, 2, 3)).double()


@pytest.mark.parametrize("sizes", [(2, 1), (3, 0)], ids=str)
def test_gradients_are_those_of_the_whole_batch(world, model, sizes):
    x = randn(3, 2, 6, 6, 6)
    rows = slice(0, sizes[0]) if world.rank == 0 else slice(sizes[0], 3)

    def backward(net, rows, summed):
        y = net(x[rows])
        loss = y.square().mean() + summed(y.sum()) / summed(torch.tensor(float(y.numel())))
        loss.backward()
        return [p.grad for p in net.parameters()]

    mesh = Mesh(world, 2)
    own = parallelize(copy.deepcopy(model), mesh)
    for _ in range(2):
        own.zero_grad()
        found = backward(own, rows, lambda t: sum_over_groups(t, mesh))
    assert_same(found, backward(copy.deepcopy(model), slice(0, 3), lambda t: t))


def test_a_line_search_keeps_ranks_together(world, model):
    mesh = Mesh(world, 2)
    own = parallelize(copy.deepcopy(model), mesh)
    x = randn(3, 2, 6, 6, 6)[slice(0, 2) if world.rank == 0 else slice(2, 3)]
    optimizer = torch.optim.LBFGS(own.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = (own(x) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for p in own.parameters():
        both = world.all_gather(p.detach())
        assert torch.equal(both[0], both[1])
