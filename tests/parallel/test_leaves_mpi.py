"""Tests of parameters outside of models, hooks and errors over real messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pydist import Mesh, distribute_tensor, parallelize
from pydist.errors import UsageError
from support.equivalence import assert_same, randn
from support.equivalence.scripts import on_mesh
from support.networks.small import initialized

pytestmark = pytest.mark.ranks(4, mpi=("mpich", "gloo"))


def batch(seed=0):
    return randn(4, 2, 5, 4, 3, seed=seed)


def train(ready, cut):
    """Trains two models, a head and a factor, with hooks, a dtype change and a caught error."""
    maker = initialized(nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, 2, 1)))
    judge = parametrizations.weight_norm(initialized(nn.Conv3d(2, 3, 3, padding=1), 1))
    head, factor = initialized(nn.Linear(3 * 60, 2), 2), nn.Parameter(randn(2, 1, 1, 1))
    maker, judge = ready(maker.float()), ready(judge)
    maker.double()
    seen = []
    maker[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    maker[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    parameters = [*maker.parameters(), *judge.parameters(), *head.parameters(), factor]
    optimizer = torch.optim.SGD(parameters, 0.05)
    for step in range(4):
        y = judge(maker(cut(batch(step))) * factor)
        y = y.full_tensor() if hasattr(y, "full_tensor") else y
        loss = head(y.flatten(1)).square().mean()
        if step == 2:
            handle = y.register_hook(lambda g: {}["boom"])
            with pytest.raises(KeyError):
                loss.backward(retain_graph=True)
            handle.remove()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*parameters, *seen]


def test_a_script_of_everything(world):
    expected = train(lambda module: module, lambda x: x)
    assert_same(on_mesh(train, Mesh(world, 2, (2, 1, 1))), expected, where=f"rank {world.rank}")


def test_unequal_values_raise_on_every_rank(world):
    mesh = Mesh(world, 2, (2, 1, 1))
    model = parallelize(initialized(nn.Conv3d(2, 2, 3, padding=1)), mesh)
    factor = nn.Parameter(torch.tensor(1.0 + (mesh.data_index == 1), dtype=torch.float64))
    loss = (model(distribute_tensor(batch()[:2], mesh)).full_tensor() * factor).square().mean()
    with pytest.raises(UsageError, match="differs between rank 0 and rank 2"):
        loss.backward()
