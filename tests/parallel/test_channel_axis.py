"""Tests of the channel axis: its ranks hold replicas, or parts of the dim that a layout cuts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pydist
from pydist import Mesh, ShardedTensor, run_local
from pydist.errors import NotSupported
from support.equivalence import FP64_BOUND, error

GROUPS = {
    "channel 2": (1, (1, 1, 1), 2),
    "channel 2, depth 2": (1, (2, 1, 1), 2),
    "channel 3, width 2": (1, (1, 1, 2), 3),
    "data 2, channel 2, height 2": (2, (1, 2, 1), 2),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(True), nn.MaxPool3d(2),
        nn.Conv3d(4, 6, 3, padding=2, dilation=2), nn.GroupNorm(2, 6), nn.LeakyReLU(0.1),
        nn.ConvTranspose3d(6, 3, 2, stride=2), nn.Conv3d(3, 2, 5, padding=2),
    ).double()  # fmt: skip


@pytest.mark.parametrize(("data", "spatial", "channel"), GROUPS.values(), ids=GROUPS)
def test_training_is_that_of_one_device(data, spatial, channel):
    whole, x = network(), torch.randn(2, 2, 8, 6, 6, dtype=torch.float64)

    def train(model: nn.Module, x: Tensor) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sin().square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    def split(world: pydist.comm.Transport) -> list[Tensor]:
        mesh = Mesh(world, data, spatial, axes={"channel": channel})
        rows = x.chunk(data)[mesh.data_index]
        model = pydist.parallelize(copy.deepcopy(whole), mesh)
        return train(model, pydist.distribute_tensor(rows, mesh))

    size = data * channel * spatial[0] * spatial[1] * spatial[2]
    for parameters in run_local(split, size):
        for mine, expected in zip(parameters, train(copy.deepcopy(whole), x), strict=True):
            assert error(mine, expected) < 16 * FP64_BOUND


CUT_ALONG_CHANNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "mean over channels": lambda x: x.mean(1),
    "softmax over channels": lambda x: x.softmax(1),
    "maximum over channels": lambda x: x.amax(1),
    "bias a channel": lambda x: x + torch.arange(4.0).double().view(4, 1, 1, 1),
    "PReLU a channel": lambda x: F.prelu(x, torch.arange(4.0).double()),
    "slice": lambda x: x[:, 1:3],
    "joined": lambda x: torch.cat([x, x * 2], 1),
    "gated": lambda x: F.glu(x, 1),
    "flattened": lambda x: x.flatten(1),
    "pooled": lambda x: F.max_pool3d(x, 2),
    "resized": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "1x1 by einsum": lambda x: torch.einsum("ncdhw,kc->nkdhw", x, torch.ones(3, 4).double()),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
}


@pytest.mark.parametrize("call", CUT_ALONG_CHANNELS.values(), ids=CUT_ALONG_CHANNELS)
def test_a_layout_may_cut_the_channels(call):
    x = torch.randn(2, 4, 6, 4, 4, dtype=torch.float64)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = call(x)
        y.sin().sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    def split(world: pydist.comm.Transport) -> list[Tensor]:
        mesh = Mesh(world, 1, (2, 1, 1), axes={"channel": 2})
        cut = pydist.distribute_tensor(x, mesh, dims={1: "channel", 2: "depth"})
        assert cut.to_local().shape == (2, 2, 3, 4, 4)
        return [t.full_tensor() if isinstance(t, ShardedTensor) else t for t in run(cut)]

    for found in run_local(split, 4):
        for mine, expected in zip(found, run(x), strict=True):
            assert error(mine, expected) < FP64_BOUND


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.conv3d(x, torch.ones(3, 4, 3, 3, 3).double()),
        lambda x: F.conv_transpose3d(x, torch.ones(4, 2, 2, 2, 2).double(), stride=2),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x, 2),
    ],
    ids=["convolution", "transposed", "batch norm", "group norm"],
)
def test_calls_that_need_all_channels_are_refused_by_name(call):
    x = torch.randn(2, 4, 6, 4, 4, dtype=torch.float64)

    def split(world: pydist.comm.Transport) -> str:
        mesh = Mesh(world, 1, axes={"channel": 2})
        with pytest.raises(NotSupported) as caught:
            call(pydist.distribute_tensor(x, mesh, dims={1: "channel"}))
        return str(caught.value)

    for text in run_local(split, 2):
        assert "channels" in text
