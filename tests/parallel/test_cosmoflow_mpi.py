"""Tests of CosmoFlow on real MPI: a split step equals the one-device step, on 4 and 2 ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from pydist import Mesh, layout_for_sample, parallelize
from pydist.models import CosmoFlow
from support.equivalence import (
    Answer,
    Task,
    assert_equal,
    group_slice,
    randn,
    shard,
    train_split,
    whole_answer,
)
from support.networks.small import BATCH, SHAPE, small_task

# Differences between libraries are covered by the contract in test_transports.py.
pytestmark = pytest.mark.ranks(4, seconds=240)


def check(task: Task, answer: Answer, mesh: Mesh, **options) -> None:
    own = task._replace(model=copy.deepcopy(task.model))
    assert_equal(train_split(own, mesh, **options), *answer)


@pytest.fixture(scope="module")
def cosmoflow():
    torch.manual_seed(0)
    model = CosmoFlow(32, dropout=0.0, batch_norm=True).double()
    task = Task(model, randn(2, 4, 32, 32, 32), randn(2, 4, seed=1), F.mse_loss)
    return task, whole_answer(task)


@pytest.mark.parametrize(("data", "spatial"), [(1, (4, 1, 1)), (1, (2, 1, 2)), (2, (2, 1, 1))])
def test_cosmoflow_on_four_ranks(world, cosmoflow, data, spatial):
    check(*cosmoflow, Mesh(world, data, spatial))


def test_cosmoflow_on_two_ranks(world, cosmoflow):
    """Both halves of the job do the same independently."""
    pair = world.split(world.rank // 2, world.rank)
    check(*cosmoflow, Mesh(pair, 1, (1, 1, 2)))


@pytest.mark.parametrize(("data", "spatial"), [(1, (4, 1, 1)), (1, (1, 2, 2)), (4, (1, 1, 1))])
def test_a_small_network_with_thin_blocks(world, data, spatial):
    task = small_task(norm=True)
    check(task, whole_answer(task), Mesh(world, data, spatial, keep_thin_blocks=True))


def test_adam_steps_keep_replicas_equal_to_the_bit(world):
    mesh = Mesh(world, 2, (2, 1, 1))
    model = parallelize(small_task(norm=True).model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = group_slice(mesh, BATCH)
    for step in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(randn(*SHAPE, seed=step)[rows]), randn(BATCH, 3)[rows]).backward()
        optimizer.step()
    for p in model.parameters():
        copies = world.all_gather(p.detach().contiguous())
        assert (copies == copies[0]).all()


def test_gradient_penalty(world):
    """Double backward runs over real messages."""

    def gradients(model, x):
        (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gx.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    model = small_task().model
    whole = randn(*SHAPE)
    expected = gradients(copy.deepcopy(model), whole.clone().requires_grad_())
    mesh = Mesh(world, 1, (2, 2, 1))
    x = shard(whole, layout_for_sample(mesh, SHAPE))
    found = gradients(parallelize(model, mesh), x)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12)
