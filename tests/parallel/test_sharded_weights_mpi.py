"""Tests of sharded weights over real messages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pydist import Mesh, ShardedTensor, distribute_tensor, parallelize
from pydist.slices import state_on_rank_0
from support.equivalence import assert_same, error, randn

pytestmark = pytest.mark.ranks(4)

MESHES = {
    "channel 2, depth 2": (1, (2, 1, 1), 2),
    "channel 2, data 2": (2, (1, 1, 1), 2),
    "channel 4": (1, (1, 1, 1), 4),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv3d(8, 6, 3, stride=2),
        nn.LeakyReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 9), nn.Tanh(),
        nn.Linear(9, 5),
    ).double()  # fmt: skip


def train(model, x):
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sin().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return optimizer


CASES = [
    pytest.param(*mesh, shares, id=f"{name}, {kind}")
    for name, mesh in MESHES.items()
    for kind, shares in (("even", {}), ("shares", {"channel": (2, 1)}))
    if not shares or mesh[2] == 2  # the shares are those of two ranks
]


@pytest.mark.parametrize(("data", "spatial", "channel", "shares"), CASES)
def test_training_is_that_of_one_device(world, data, spatial, channel, shares):
    mesh = Mesh(world, data, spatial, axes={"channel": channel}, shares=shares)
    x, whole = randn(2, 2, 7, 6, 6), network()
    rows = x.chunk(data)[mesh.data_index]
    model = parallelize(copy.deepcopy(whole), mesh, sharded_weights=True)
    optimizer, expected = train(model, distribute_tensor(rows, mesh)), train(whole, x)
    found = model.state_dict()
    for name, tensor in whole.state_dict().items():
        assert error(found[name], tensor) < 1e-11
    moments = [values["exp_avg"] for values in optimizer.state_dict()["state"].values()]
    for mine, values in zip(moments, expected.state_dict()["state"].values(), strict=True):
        assert error(mine, values["exp_avg"]) < 1e-11
    with state_on_rank_0():
        parts = model.state_dict(), optimizer.state_dict()
    tensors = [*parts[0].values(), *(each["exp_avg"] for each in parts[1]["state"].values())]
    assert any(isinstance(tensor, ShardedTensor) for tensor in tensors) == (world.rank > 0)
    if world.rank == 0:
        assert_same(tensors, [*found.values(), *moments])
