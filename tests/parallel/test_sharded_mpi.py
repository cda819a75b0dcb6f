"""Tests of the partitioned optimizer over real messages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pydist.gradients.buckets
from pydist import Mesh, parallelize
from pydist.optim import ShardedOptimizer, gather_gradients, sharded
from support.equivalence import assert_same
from support.networks.small import loss_of, small
from support.training.interrupted import run

# Open MPI runs the other networks.
pytestmark = pytest.mark.ranks(4, mpi=("mpich", "gloo"))


def train(mesh, use, steps=5):
    model = parallelize(small(norm=True), mesh)
    optimizer = sharded(torch.optim.Adam(model.parameters(), 1e-2), model, use)
    for step in range(steps):
        with model.no_sync():
            loss_of(model, mesh, step + 10).backward()
        loss_of(model, mesh, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("limit", [1, 2000])
@pytest.mark.parametrize(("data", "spatial"), [(2, (2, 1, 1)), (1, (4, 1, 1))])
def test_a_shared_step_is_the_unshared_one(world, data, spatial, limit, monkeypatch):
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", limit)
    mesh = Mesh(world, data, spatial)
    model, optimizer = train(mesh, "always")
    assert isinstance(optimizer, ShardedOptimizer)
    expected, plain = train(mesh, "never")
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)  # another order of summation
        copies = world.all_gather(a.detach().contiguous())
        assert (copies == copies[0]).all()
    found, state = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for index, values in state.items():
        assert found[index]["step"] == values["step"]
        torch.testing.assert_close(
            found[index]["exp_avg_sq"], values["exp_avg_sq"], rtol=1e-7, atol=1e-12
        )


def test_gathered_gradients(world):
    mesh = Mesh(world, 2, (1, 2, 1))
    model, _ = train(mesh, "always", steps=1)
    plain = small(norm=True)
    plain.load_state_dict(copy.deepcopy(dict(model.state_dict())))
    parallelize(plain, mesh)
    for each in (model, plain):
        loss_of(each, mesh).backward()
        gather_gradients(each)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_single_precision_keeps_replicas_equal(world):
    mesh = Mesh(world, 4)
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(300, 301), nn.Tanh(), nn.Linear(301, 3)), mesh)
    optimizer = sharded(torch.optim.AdamW(model.parameters()), model, "always")
    for step in range(3):
        x = torch.randn(2, 300, generator=torch.Generator().manual_seed(10 * step + world.rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.parameters():
        copies = world.all_gather(p.detach())
        assert (copies == copies[0]).all()


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])
def test_gradients_after_a_backward_that_raised(world, shared, monkeypatch):
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", 1)
    for program in ("b n r0 b s", "n r2 b s b", "b R2 b s", "b r2 z b s"):
        expected = run(program, None, 2, shared=False)
        found = run(program, Mesh(world, 2, (2, 1, 1)), 2, shared=shared)
        assert_same(found, expected, where=program)
