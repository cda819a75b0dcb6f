"""Tests of the channel axis: its ranks hold replicas, or parts of the dim that a layout cuts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pydist
from pydist import Mesh, run_local
from pydist.errors import UsageError
from pydist.ops.coarsening import channel_form
from pydist.ops.conv import split_channels
from support.equivalence import FP64_BOUND, error, whole_of
from support.random_networks.blocks import ChannelAttention

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
        return [whole_of(t) for t in run(cut)]

    for found in run_local(split, 4):
        for mine, expected in zip(found, run(x), strict=True):
            assert error(mine, expected) < FP64_BOUND


def head() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3))


class Slice(nn.Module):
    """Layer that gets the first channel, which is on one rank."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :1])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv3d(4, 6, 3, padding=1),
    "without bias, of stride 2": lambda: nn.Conv3d(4, 5, 3, 2, 1, bias=False),
    "unpadded": lambda: nn.Conv3d(4, 3, 3),
    "fewer filters than ranks": lambda: nn.Conv3d(4, 1, 1),
    "of a slice": lambda: Slice(nn.Conv3d(1, 3, 3, padding=1)),
    "two groups": lambda: nn.Conv3d(4, 6, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv3d(4, 8, 3, padding=1, groups=4),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv3d(4, 6, 3, padding=1)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv3d(4, 6, 1)),
    "transposed": lambda: nn.ConvTranspose3d(4, 3, 2, stride=2),
    "transposed, with overlap": lambda: nn.ConvTranspose3d(4, 6, 3, 2, 1, 1),
    "transposed, two groups": lambda: nn.ConvTranspose3d(4, 6, 3, 2, 1, groups=2),
    "transposed, depthwise": lambda: nn.ConvTranspose3d(4, 4, 4, 2, 1, groups=4),
    "transposed of a slice": lambda: Slice(nn.ConvTranspose3d(1, 3, 3, 2)),
    "batch norm": lambda: nn.BatchNorm3d(4),
    "batch norm in evaluation": lambda: nn.BatchNorm3d(4).eval(),
    "instance norm": lambda: nn.InstanceNorm3d(4, affine=True, track_running_stats=True),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm over ranks": lambda: nn.GroupNorm(1, 4),
    "local response norm": lambda: nn.LocalResponseNorm(3),
    "PReLU": lambda: nn.PReLU(4),
    "norm and PReLU": lambda: nn.Sequential(nn.InstanceNorm3d(4), nn.PReLU(4)),
    "pixel unshuffle": lambda: nn.PixelUnshuffle(2),
    "channel shuffle": lambda: nn.ChannelShuffle(2),
    "head": head,
    "channel attention by einsum": lambda: ChannelAttention("einsum"),
    "channel attention by bmm": lambda: ChannelAttention("bmm"),
    "channel attention by matmul": lambda: ChannelAttention("matmul"),
}


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layers_on_split_channels(make, is_cut):
    torch.manual_seed(0)
    whole = make().double()
    x = torch.randn(2, 4, 6, 4, 4, dtype=torch.float64)

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = layer(x)
        (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        grad.square().sum().backward()  # a gradient penalty: second order
        grads = [p.grad for p in layer.parameters()]
        found = [y.detach(), x.grad, *grads, *(b for b in layer.buffers())]
        return [each for each in found if each is not None]

    def split(world: pydist.comm.Transport) -> list[Tensor]:
        mesh = Mesh(world, 1, (2, 1, 1), axes={"channel": 2})
        dims = {1: "channel", 2: "depth"} if is_cut else {2: "depth"}
        model = pydist.parallelize(copy.deepcopy(whole), mesh)
        found = run(model, pydist.distribute_tensor(x, mesh, dims=dims))
        return [whole_of(t) for t in found]

    expected = run(copy.deepcopy(whole), x)
    for found in run_local(split, 4):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert error(mine, other) < 4 * FP64_BOUND


PAIRS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "convolutions": lambda: (
        nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(),
        nn.Conv3d(4, 5, 3, 2, 1), nn.ReLU(), nn.Conv3d(5, 3, 1, bias=False),
    ),
    "transposed": lambda: (
        nn.ConvTranspose3d(2, 4, 2, 2), nn.Tanh(), nn.ConvTranspose3d(4, 3, 3, 2, 1, bias=False),
        nn.GroupNorm(1, 3), nn.ConvTranspose3d(3, 4, 1),
    ),
    "groups between": lambda: (
        nn.Conv3d(2, 4, 1), nn.Conv3d(4, 4, 3, padding=1, groups=4), nn.Conv3d(4, 6, 3, padding=1),
    ),
}  # fmt: skip
SPLITS = {
    "channel 2, depth 2": ((2, 1, 1), 2, None),
    "channel 3": ((1, 1, 1), 3, None),
    "uneven": ((1, 2, 1), 2, {"channel": (3, 1)}),
}


@pytest.mark.parametrize("form", ["sum", "scatter", "gather"])
@pytest.mark.parametrize(("spatial", "channel", "shares"), SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_each_form_of_a_layer_with_cut_inputs(make, spatial, channel, shares, form, monkeypatch):
    monkeypatch.setattr(split_channels, "channel_form", lambda *_: form)
    torch.manual_seed(0)
    whole = nn.Sequential(*make()).double()
    x = torch.randn(2, 2, 6, 6, 4, dtype=torch.float64)

    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = model(x)
        (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        grad.square().sum().backward()  # a gradient penalty: second order
        assert x.grad is not None
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    def split(world: pydist.comm.Transport) -> list[Tensor]:
        mesh = Mesh(world, 1, spatial, axes={"channel": channel}, shares=shares)
        found = run(
            pydist.parallelize(copy.deepcopy(whole), mesh), pydist.distribute_tensor(x, mesh)
        )
        return [whole_of(t) for t in found]

    expected = run(copy.deepcopy(whole), x)
    for found in run_local(split, channel * math.prod(spatial)):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert error(mine, other) < 16 * FP64_BOUND


@pytest.mark.parametrize(
    ("channels", "outputs", "extent", "form"),
    [
        (8, 8, 4, "sum"),  # small: the number of messages decides
        (32, 32, 64, "scatter"),  # large: what follows is divided
        (8, 32, 64, "gather"),  # the input is smaller than the result
        (8, 1, 64, "sum"),  # fewer outputs than ranks
    ],
)
def test_the_form_is_chosen_by_cost(channels, outputs, extent, form):
    def split(world: pydist.comm.Transport) -> tuple[bool, int]:
        mesh = Mesh(world, 1, (1, 1, 1), axes={"channel": 2})
        cut = pydist.distribute_tensor(
            torch.ones(1, channels, extent, extent, 4), mesh, dims={1: "channel"}
        )
        shape = (1, outputs, extent, extent, 4)
        if outputs > 1:
            assert channel_form(cut.layout, shape) == form
        result = F.conv3d(cut, torch.ones(outputs, channels, 1, 1, 1))
        return result.layout.splits[1] is not None, result.to_local().shape[1]

    own = outputs if form == "sum" else outputs // 2
    assert run_local(split, 2) == [(form != "sum", own)] * 2


def test_layers_split_outputs_and_inputs_in_turn():
    layers = nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.Conv3d(8, 4, 1)
    layers = *layers, nn.ConvTranspose3d(4, 4, 2, 2), nn.ConvTranspose3d(4, 4, 3, 1, 1), head()
    whole, sample = nn.Sequential(*layers), torch.randn(1, 2, 4, 4, 4)

    def split(world: pydist.comm.Transport) -> list[tuple[int, ...]]:
        mesh = Mesh(world, 1, (2, 1, 1), axes={"channel": 3})
        model = pydist.parallelize(copy.deepcopy(whole), mesh)
        x = pydist.distribute_tensor(sample, mesh, dims={2: "depth"})
        shapes = []
        for layer in model:
            x = layer(x)
            shapes.append(tuple(x.to_local().shape))
        return shapes

    for rank, shapes in enumerate(run_local(split, 6)):
        filters = (3, 3, 2)[rank // 2]  # 8 filters over 3 ranks
        assert shapes[0] == shapes[1] == (1, filters, 2, 4, 4)
        assert shapes[2] == (1, 4, 2, 4, 4)
        assert shapes[3] == (1, (2, 1, 1)[rank // 2], 4, 8, 8)
        assert shapes[4] == (1, 4, 4, 8, 8)
        assert shapes[5] == (1, 3)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout3d, nn.FeatureAlphaDropout])
def test_dropout_masks_are_those_of_one_rank(kind):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv3d(2, 6, 3, padding=1), kind(0.5), nn.Conv3d(6, 4, 1)).double()
    x = torch.randn(2, 2, 6, 4, 4, dtype=torch.float64)

    def run(world: pydist.comm.Transport, spatial: tuple[int, ...], channel: int) -> list[Tensor]:
        mesh = Mesh(world, 1, spatial, axes={"channel": channel})
        model = pydist.parallelize(copy.deepcopy(whole), mesh)
        steps = [model(pydist.distribute_tensor(x, mesh)) for _ in range(2)]
        sum(y.square().sum() for y in steps).backward()
        shown = [y.detach().full_tensor() for y in steps]
        return [*shown, *(p.grad for p in model.parameters())]

    expected = run_local(lambda t: run(t, (1, 1, 1), 1), 1)[0]
    assert (expected[0] - expected[1]).abs().max() > 0.1
    for found in run_local(lambda t: run(t, (2, 1, 1), 3), 6):
        for mine, other in zip(found, expected, strict=True):
            assert error(mine, other) < 4 * FP64_BOUND


def test_a_pair_of_layers_has_one_sum_each_way():
    whole = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1))
    x = torch.randn(1, 2, 4, 4, 4)

    def split(world: pydist.comm.Transport) -> list[int]:
        mesh = Mesh(world, 1, (2, 1, 1), axes={"channel": 2})
        group, sizes = mesh.group(("channel",)), []
        send = group.all_reduce

        def counting(tensor: Tensor, *args: str) -> None:
            sizes.append(tensor.numel())
            send(tensor, *args)

        group.all_reduce = counting
        model = pydist.parallelize(copy.deepcopy(whole), mesh)
        cut = pydist.distribute_tensor(x, mesh).requires_grad_()
        y = model(cut)
        forward = len(sizes)
        y.square().sum().backward()
        return [forward, *sizes]

    halves = [1, 3 * 2 * 4 * 4, 2 * 2 * 4 * 4]  # of y forward, of dL/dx backward; half the depth
    assert run_local(split, 4) == [halves] * 4


@pytest.mark.parametrize("channel", [1, 2])
def test_weights_that_are_data_of_a_group_keep_its_gradient(channel):
    """Sharded weights are no parameters; plain slopes are parameters of all groups."""
    x, kernels = torch.randn(4, 3, 4, 4, 4).double(), torch.randn(2, 4, 3, 3, 3, 3).double()
    slopes = torch.rand(4).double()

    def loss(x: Tensor, kernel: Tensor, slope: Tensor) -> Tensor:
        return F.prelu(F.conv3d(x, kernel, padding=1), slope).square().mean()

    def split(world: pydist.comm.Transport) -> tuple[int, Tensor, Tensor]:
        mesh = Mesh(world, 2, (2, 1, 1), axes={"channel": channel})
        rows = pydist.distribute_tensor(x.chunk(2)[mesh.data_index], mesh)
        kernel = pydist.distribute_tensor(kernels[mesh.data_index], mesh, dims={})
        kernel, slope = kernel.detach().requires_grad_(), slopes.clone().requires_grad_()
        loss(rows, kernel, slope).backward()
        return mesh.data_index, kernel.grad.full_tensor(), slope.grad

    leaves = [(k.clone().requires_grad_(), slopes.clone().requires_grad_()) for k in kernels]
    for rows, of_group in zip(x.chunk(2), leaves, strict=True):
        loss(rows, *of_group).backward()
    mean = (leaves[0][1].grad + leaves[1][1].grad) / 2
    for group, of_kernel, of_slope in run_local(split, 4 * channel):
        assert error(of_kernel, leaves[group][0].grad) < 4 * FP64_BOUND
        assert error(of_slope, mean) < 4 * FP64_BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 4, 3, padding=1))
    x = torch.randn(1, 2, 8, 6, 6)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return model(x).detach()

    def split(world: pydist.comm.Transport) -> Tensor:
        mesh = Mesh(world, 1, (2, 1, 1), axes={"channel": 2})
        y = run(pydist.parallelize(copy.deepcopy(whole), mesh), pydist.distribute_tensor(x, mesh))
        assert y.dtype == dtype
        return y.full_tensor()

    exact = run(copy.deepcopy(whole), x).float()
    for found in run_local(split, 4):
        assert error(found.float(), exact) < (1e-5 if dtype is torch.float32 else 2e-2)


def test_channels_that_do_not_fit_are_named():
    x = torch.randn(1, 4, 4, 4, 4)

    def split(world: pydist.comm.Transport) -> str:
        mesh = Mesh(world, 1, axes={"channel": 2})
        with pytest.raises(UsageError) as caught:
            F.conv3d(
                pydist.distribute_tensor(x, mesh, dims={1: "channel"}), torch.ones(4, 3, 1, 1, 1)
            )
        return str(caught.value)

    for text in run_local(split, 2):
        assert "4 channels does not fit a weight of shape (4, 3, 1, 1, 1)" in text
