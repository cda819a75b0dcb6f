"""Tests of hooks on one rank of a real job: the other ranks must not wait for it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from pydist import Mesh, ShardedTensor, layout_for_sample, parallelize
from pydist.models import CosmoFlow
from support.equivalence import randn, shard

pytestmark = pytest.mark.ranks(2, mpi=("openmpi", "mpich"), seconds=240)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return CosmoFlow(32, dropout=0.0, batch_norm=True).double()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spatial", [(2, 1, 1), (1, 1, 2)])
def test_cosmoflow_watched_on_one_rank(world, model, spatial, batch):
    """With one sample both ranks hold the output; with two, each rank holds its own."""

    def step(model, x, looks):
        seen = {}
        y = model(x)
        target = randn(batch, 4, seed=1)
        loss = F.mse_loss(y, target)
        if looks:
            y.register_hook(lambda grad: seen.update(y=grad))
            loss.register_hook(lambda grad: seen.update(loss=grad))
            model.features.conv2.register_full_backward_hook(
                lambda module, into, out: seen.update(conv2=into[0])
            )
        (loss.square() + (y * y.mean()).square().sum()).backward()
        return seen

    whole = randn(batch, 4, 32, 32, 32)
    reference = copy.deepcopy(model)
    expected = step(reference, whole.clone().requires_grad_(), True)
    mesh = Mesh(world, 1, spatial)
    own = parallelize(copy.deepcopy(model), mesh)
    x = shard(whole, layout_for_sample(mesh, whole.shape))
    seen = step(own, x, mesh.rank == 0)
    assert seen.keys() == (expected.keys() if mesh.rank == 0 else set())
    for name, grad in seen.items():
        here, there = grad, expected[name]
        if isinstance(grad, ShardedTensor):
            here, there = grad.to_local(), shard(there, grad.layout).to_local().detach()
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-14)
    for p, q in zip(own.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-12)
