"""Split transposed convolution equals the one-device run, at every order of derivative."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pydist.errors import NotSupported, UsageError
from pydist.exchange.adjoints import mean_ranks
from pydist.exchange.exchanger import Exchanger
from pydist.exchange.redistribution import BoxGatherer
from pydist.grid import SAMPLE_AXES
from pydist.ops.conv.transposed_window import TransposedWindow
from support.equivalence import (
    Task,
    check_function,
    check_network,
    error,
    layout_at,
    on_ranks,
    randn,
    shard,
)
from support.equivalence.strategies import cuts
from support.networks.small import initialized

CONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

channels = st.integers(1, 2)


@dataclass(frozen=True)
class Case:
    """Transposed convolution with at least one output, and the split points of its input."""

    extents: tuple[int, ...]
    window: TransposedWindow
    points: list[list[int]]

    @property
    def arguments(self) -> dict[str, object]:
        names = "stride", "padding", "output_padding", "dilation"
        return {name: getattr(self.window, name) for name in names}


@st.composite
def cases(draw: st.DrawFn, dims: int) -> Case:
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    extents = each(1, 6 if dims < 3 else 4)
    kernel, stride, dilation = each(1, 5 if dims < 3 else 4), each(1, 3), each(1, 2)
    extra = tuple(draw(st.integers(0, max(sd) - 1)) for sd in zip(stride, dilation, strict=True))
    padding = []
    for n, k, s, d, more in zip(extents, kernel, stride, dilation, extra, strict=True):
        whole = (n - 1) * s + d * (k - 1) + 1 + more
        padding.append(draw(st.integers(0, min(3, (whole - 1) // 2))))
    window = TransposedWindow(kernel, stride, tuple(padding), extra, dilation)
    return Case(extents, window, draw(cuts(extents)))


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
def test_any_window_any_split(dims, data):
    case: Case = data.draw(cases(dims))
    groups, per_group, out_per_group = (data.draw(channels, label=n) for n in ("g", "in", "out"))
    x = randn(data.draw(channels, label="N"), groups * per_group, *case.extents)
    weight = randn(groups * per_group, out_per_group, *case.window.kernel, seed=1)
    bias = [randn(groups * out_per_group, seed=2)] if data.draw(st.booleans(), "bias") else []

    def conv(x, weight, bias=None):
        return CONV[dims](x, weight, bias, groups=groups, **case.arguments)

    check_function(
        conv,
        x,
        [weight, *bias],
        case.points,
        second_order=data.draw(st.booleans(), "second order"),
        channel=data.draw(st.sampled_from((1, 1, 2, 3)), "channel"),
    )


DECODER = {"stride": 2, "padding": 1, "output_padding": 1}
HALF = [0, 4, 8]
NAMED = {
    "2x2x1": (DECODER, 3, [HALF, [0, 3, 8], None]),
    "2x2x2": ({"stride": 2, "padding": 1}, 4, [HALF, [0, 5, 8], [0, 3, 8]]),
    "8x1x1 with empty ranks": (DECODER, 3, [[0, 0, 1, 2, 4, 4, 6, 8, 8], None, None]),
    "8x1x1 of one plane": (DECODER, 3, [list(range(9)), None, None]),
    "halo wider than a block": ({"stride": 1, "padding": 3}, 7, [[0, 1, 2, 3, 8], None, None]),
    "kernel = stride, empty ranks": ({"stride": 2}, 2, [[0, 0, 4, 4, 8], None, None]),
    "kernel = stride, padded": ({"stride": 3, "padding": 1}, 3, [[0, 3, 8], None, None]),
    "kernel < stride": ({"stride": 3}, 2, [[0, 3, 8], None, HALF]),
    "all on one": (DECODER, 3, [[0, 0, 8], [0, 8, 8], None]),
    "dilated, more output padding than stride": (
        {"stride": 2, "dilation": 4, "output_padding": 3}, 3, [[0, 3, 8], None, None]
    ),
    "most of it cropped": ({"padding": 3}, 2, [[0, 2, 4, 8], None, None]),
}  # fmt: skip


@pytest.mark.parametrize("second_order", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(("options", "kernel", "points"), NAMED.values(), ids=NAMED)
def test_geometries_by_name(options, kernel, points, second_order):
    check_function(
        lambda x, w, b: F.conv_transpose3d(x, w, b, **options),
        randn(1, 2, 8, 8, 8),
        [randn(2, 2, *[kernel] * 3, seed=1), randn(2, seed=2)],
        points,
        second_order=second_order,
    )


@pytest.mark.parametrize("points", [[0, 2, 2], [0, 1, 2], [0, 0, 2]], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_call_in_place_may_follow(dims, points):
    """The result may be cut from a larger one, or be empty."""
    check_function(
        lambda x, w: F.relu(CONV[dims](x * 1, w, None, 3, 1, 1, dilation=2), inplace=True),
        randn(2, 1, *[2] * dims),
        [randn(1, 1, *[3] * dims, seed=1)],
        [points, *[None] * (dims - 1)],
        keep_thin_blocks=True,
    )


@pytest.mark.parametrize("name", ["2x2x1", "kernel = stride, empty ranks", "most of it cropped"])
def test_axes_along_which_ranks_hold_copies(name):
    """Gradients of both orders are neither doubled nor halved."""
    options, kernel, _ = NAMED[name]

    def gradients(x, weight, mean=lambda g: g):
        y = F.conv_transpose3d(x, weight, **options)
        first = torch.autograd.grad((y**3).sum(), [x, weight], create_graph=True)
        penalty = sum((g**2).sum() for g in (first[0], mean(first[1])))
        return [*first, *torch.autograd.grad(penalty, [x, weight])]

    whole, kernels = randn(1, 2, 8, 8, 8), randn(2, 2, *[kernel] * 3, seed=1)

    def body(mesh):
        def mean(g):
            return mean_ranks(g, mesh, SAMPLE_AXES)

        x = shard(whole, layout_at(mesh, whole.shape, [[0, 3, 8], None, None]))
        found = gradients(x, nn.Parameter(kernels.clone()), mean)
        return [g.full_tensor() if g is found[0] or g is found[2] else mean(g) for g in found]

    expected = gradients(whole.clone().requires_grad_(), kernels.clone().requires_grad_())
    for found in on_ranks((2, 2, 1), body):
        for mine, theirs in zip(found, expected, strict=True):
            assert error(mine.detach(), theirs.detach()) <= 1e-12


# -- output layouts and messages -------------------------------------------------------------

PAIRS = {
    "MONAI UNet": ((3, 2, 1), DECODER, 3, [0, 4, 8, 12]),
    "nnU-Net": ((3, 2, 1), {"stride": 2}, 2, [0, 2, 8, 12]),
    "k4": ((4, 2, 1), {"stride": 2, "padding": 1}, 4, [0, 6, 12]),
    "k5": ((5, 2, 2), {"stride": 2, "padding": 2, "output_padding": 1}, 5, [0, 6, 6, 12]),
    "by 3": ((3, 3, 0), {"stride": 3}, 3, [0, 3, 12]),
    "not padded": ((3, 2, 0), {"stride": 2}, 3, [0, 7, 13]),
    "no stride": ((3, 1, 1), {"padding": 1}, 3, [0, 5, 13]),
    "no stride, not padded": ((3, 1, 0), {}, 3, [0, 5, 13]),
}


@pytest.mark.parametrize(("encoder", "decoder", "kernel", "points"), PAIRS.values(), ids=PAIRS)
def test_a_decoder_comes_back_to_its_encoders_partition(encoder, decoder, kernel, points):
    size, stride, padding = encoder
    shape = (1, 1, points[-1], 13, 13)

    def body(mesh):
        x = shard(randn(*shape), layout_at(mesh, shape, [points, None, None]))
        down = F.conv3d(x, randn(1, 1, *[size] * 3), None, stride, padding)
        up = F.conv_transpose3d(down, randn(1, 1, *[kernel] * 3), **decoder)
        return list(up.layout.splits[2].partition.points)

    ranks = on_ranks((len(points) - 1, 1, 1), body, keep_thin_blocks=True)
    assert ranks == [points] * len(ranks)


def _step(options, kernel, points):
    """Runs forward and backward of 3-D and 1-D transposed convolutions."""

    def body(mesh):
        for dims in (1, 3):
            shape = (1, 2, *[8] * dims)
            x = shard(randn(*shape), layout_at(mesh, shape, [points, *[None] * (dims - 1)]))
            weight = nn.Parameter(randn(2, 2, *[kernel] * dims, seed=1))
            y = CONV[dims](x, weight, **options)
            torch.autograd.grad((y * y).sum(), [x, weight])

    on_ranks((len(points) - 1, 1, 1), body)


@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_a_kernel_no_larger_than_the_stride_exchanges_nothing(kernel, monkeypatch):
    def never(*_):
        raise AssertionError("an exchange was planned")

    monkeypatch.setattr(Exchanger, "__init__", never)
    for options in ({"stride": 3}, {"stride": 3, "padding": kernel // 2, "output_padding": 2}):
        _step(options, kernel, [0, 3, 3, 8])


@pytest.mark.parametrize("dims", [2, 3])
def test_where_blocks_line_up_nothing_is_gathered(dims, monkeypatch):
    def never(*_, **__):
        raise AssertionError("inputs were gathered")

    monkeypatch.setattr(BoxGatherer, "__call__", never)
    for options, kernel in (
        (DECODER, 3),
        ({"stride": 2, "padding": 1}, 4),
        ({"stride": 2}, 3),
        ({"padding": 1}, 3),
    ):
        check_function(
            lambda x, w, o=options: CONV[dims](x, w, **o),
            randn(1, 2, *(8, 4, 4)[:dims]),
            [randn(2, 2, *[kernel] * dims, seed=1)],
            [[0, 3, 8], [0, 2, 4], None][:dims],
        )


# -- networks ------------------------------------------------------------------------------


class Decoder(nn.Module):
    """U-Net of two levels with MONAI's (k3 s2) or nnU-Net's (k2 s2) upsampling."""

    def __init__(self, kernel: int, skip_first: bool) -> None:
        super().__init__()
        options = DECODER if kernel == 3 else {"stride": 2}
        self.skip_first = skip_first
        self.down = nn.ModuleList([nn.Conv3d(2, 3, 3, 2, 1), nn.Conv3d(3, 4, 3, 2, 1)])
        self.up = nn.ModuleList(
            [
                nn.ConvTranspose3d(4, 3, kernel, **options),
                nn.ConvTranspose3d(6, 2, kernel, **options),
            ]
        )
        self.last = nn.Conv3d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = F.leaky_relu(self.down[0](x))
        two = F.leaky_relu(self.down[1](one))
        for up, skip in ((self.up[0], one), (self.up[1], x)):
            two = F.leaky_relu(up(two))
            two = torch.cat([skip, two] if self.skip_first else [two, skip], dim=1)
        return self.last(two)


# In the second row of extents, the partitions of skips and decoders differ.
@pytest.mark.parametrize("extents", [(16, 8, 8), (12, 12, 4)], ids=str)
@pytest.mark.parametrize("spatial", [(2, 1, 1), (2, 2, 1), (8, 1, 1)], ids=str)
@pytest.mark.parametrize("keep_thin_blocks", [False, True], ids=["placed", "kept"])
def test_a_unet(spatial, extents, keep_thin_blocks):
    for kernel, skip_first in ((3, True), (2, False)):
        task = Task(
            initialized(Decoder(kernel, skip_first)),
            randn(1, 2, *extents, seed=1),
            randn(1, 2, *extents, seed=2),
            F.mse_loss,
        )
        check_network(task, spatial, keep_thin_blocks=keep_thin_blocks)


def test_the_output_size_chooses_the_output_padding():
    def layers(x, weight):
        layer = nn.ConvTranspose3d(2, 2, 3, stride=2, padding=1, bias=False)
        del layer.weight
        layer.weight = weight
        return layer(x, output_size=(8, 7, 8))

    x = randn(1, 2, 4, 4, 4)
    check_function(layers, x, [randn(2, 2, 3, 3, 3, seed=1)], [[0, 1, 4], [0, 2, 4], None])


# -- refusals ------------------------------------------------------------------------------

WEIGHT = (2, 2, 3, 3, 3)
REFUSED = {
    "no batch dim": (lambda x, w: F.conv_transpose3d(x[0], w), NotSupported, "N, C"),
    "complex": (lambda x, w: F.conv_transpose3d(x + 1j, w), NotSupported, "complex numbers"),
    "plain input": (lambda x, w: F.conv_transpose3d(w, x), NotSupported, "the input is plain"),
    "channels": (
        lambda x, w: F.conv_transpose3d(x, w[:1]), UsageError, "input channels, output channels"
    ),
    "groups": (lambda x, w: F.conv_transpose3d(x, w, groups=4), UsageError, "in 4 groups"),
    "output padding": (
        lambda x, w: F.conv_transpose3d(x, w, output_padding=1), UsageError, "must be smaller"
    ),
    "negative padding": (
        lambda x, w: F.conv_transpose3d(x, w, padding=(0, -1, 0)), UsageError, "negative padding"
    ),
    "negative output padding": (
        lambda x, w: F.conv_transpose3d(x, w, output_padding=(0, -1, 0)), UsageError, "negative"
    ),
    "nothing left": (
        lambda x, w: F.conv_transpose3d(x, w, padding=3), UsageError, r"gives extents \(0, 0, 0\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_what_is_expected(call, kind, message):
    def body(mesh):
        x = shard(randn(1, 2, 4, 4, 4), layout_at(mesh, (1, 2, 4, 4, 4), [[0, 2, 4], None, None]))
        with pytest.raises(kind, match=message):
            call(x, randn(*WEIGHT))

    on_ranks((2, 1, 1), body)


def test_channels_cut_over_a_spatial_axis():
    x, *parameters = randn(1, 4, 5), randn(4, 4, 3, seed=1), randn(4, seed=2)
    check_function(F.conv_transpose1d, x, parameters, [[0, 1, 4], [0, 5]], second_order=True)
