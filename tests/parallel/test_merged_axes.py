"""Networks that merge two dims into channels, which are then cut over two axes.

The first of these axes cuts them the slowest, while ranks of a group are in the order of the mesh.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pydist
from pydist.ops.conv import split_channels
from support.equivalence import Task, check_network, on_ranks, randn

MESHES = {
    "depth, channel": (2, (2, 1, 1), {"channel": 2}),
    "height, depth": (3, (2, 2, 1), {}),
}


class Merged(nn.Module):
    """Network whose channels are a spatial dim and the one that is then the next."""

    def __init__(self, dim: int, layer: nn.Module) -> None:
        super().__init__()
        self.dim, self.first, self.layer = dim, nn.Conv3d(1, 4, 1), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x).transpose(1, self.dim).flatten(1, 2))


def check(layer, dim, spatial, axes):
    torch.manual_seed(0)
    model = Merged(dim, layer).double()
    x = randn(2, 1, 4, 4, 4)
    target = randn(*model(x).shape, seed=1)
    check_network(Task(model, x, target, F.mse_loss), spatial, axes=axes)


@pytest.mark.parametrize("name", MESHES)
def test_the_axes_cut_channels_in_another_order_than_the_mesh(name):
    dim, spatial, axes = MESHES[name]

    def body(mesh):
        model = pydist.parallelize(Merged(dim, nn.Identity()).double(), mesh)
        return model(pydist.distribute_tensor(randn(2, 1, 4, 4, 4), mesh)).layout.splits[1].axes

    assert on_ranks(spatial, body, axes=axes)[0] == tuple(name.split(", "))


@pytest.mark.parametrize("mesh", MESHES)
def test_running_statistics(mesh):
    for norm in (nn.BatchNorm2d(16), nn.InstanceNorm2d(16, track_running_stats=True)):
        check(norm, *MESHES[mesh])


@pytest.mark.parametrize("mesh", MESHES)
def test_scattered_sums(mesh, monkeypatch):
    monkeypatch.setattr(split_channels, "channel_form", lambda *_: "scatter")
    check(nn.Conv2d(16, 6, 1), *MESHES[mesh])
