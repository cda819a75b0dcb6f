"""Draws the networks of programs: motifs of real networks, and random blocks between them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from support.random_networks.chains import grow, shape_after
from support.random_networks.layers import conv
from support.random_networks.spot import Source, Spot, call

Blocks = list[Source]
Motif = list[Callable[[Spot], Source]]

MOST_VALUES = 900
"""Maximum number of values in one sample of an input."""


def sample_shape(numbers: random.Random) -> tuple[int, ...]:
    """Draws channels and extents of a sample; mostly three dims."""
    dims = numbers.choice((3, 3, 3, 3, 3, 2, 1))
    extents = [numbers.randint(2, {1: 16, 2: 9, 3: 8}[dims]) for _ in range(dims)]
    extents[0] = max(extents[0], numbers.randint(2, 12))
    while math.prod(extents) > MOST_VALUES // 3:
        extents[numbers.randrange(dims)] //= 2
    return (numbers.randint(1, 3), *(max(2, n) for n in extents))


def wide_network(numbers: random.Random, shape: tuple[int, ...]) -> Blocks:
    """Returns two convolutions with large weights for an input of [N, C, ...]."""
    first = Spot(numbers, shape, 0).layer("Conv", shape[1], 32, 1)
    return [first, Spot(numbers, shape, 0).layer("Conv", 32, 48, 3, padding=1)]


def plain_network(numbers: random.Random, shape: tuple[int, ...]) -> tuple[Blocks, tuple[int, ...]]:
    """Returns layers that torch can also compute for zero samples, and their result's shape."""
    layers: Blocks = []
    for _ in range(numbers.randint(1, 3)):
        found, shape = chosen(numbers, shape)
        layers += found
    return _with_weight(numbers, layers, shape)


def network(numbers: random.Random, shape: tuple[int, ...]) -> tuple[Blocks, tuple[int, ...]]:
    """Returns layers for an input of [N, C, ...], and the shape of their result."""
    layers: Blocks = []
    for _ in range(numbers.randint(1, 3)):
        if numbers.random() < 0.35:
            found, shape = grow(numbers, shape, 1, 1)
        else:
            found, shape = chosen(numbers, shape)
        layers += found
    return _with_weight(numbers, layers, shape)


def _with_weight(
    numbers: random.Random, layers: Blocks, shape: tuple[int, ...]
) -> tuple[Blocks, tuple[int, ...]]:
    if not any("Conv" in layer for layer in layers):
        layers.append(Spot(numbers, shape, 0).layer("Conv", shape[1], 2, 1))
        shape = (shape[0], 2, *shape[2:])
    return layers, shape


def chosen(numbers: random.Random, shape: tuple[int, ...]) -> tuple[Blocks, tuple[int, ...]]:
    """Returns the layers of a random motif that fit the shape, and the shape of their result."""
    return fitted(numbers, shape, numbers.choice(MOTIFS))


def fitted(
    numbers: random.Random, shape: tuple[int, ...], motif: Motif
) -> tuple[Blocks, tuple[int, ...]]:
    """Returns the layers of a motif that fit the shape, and the shape of their result."""
    kept: Blocks = []
    for make_layer in motif:
        layer = make_layer(Spot(numbers, shape, 0))
        after = shape_after(layer, shape)
        if after is not None:
            kept.append(layer)
            shape = after
    return kept, shape


def plain_conv(s: Spot) -> Source:
    channels = s.number(1, 4)
    return s.layer("Conv", s.channels, channels, 3, padding=1, stride=s.pick(1, 1, 1, 2))


def reaching_conv(s: Spot) -> Source:
    """Returns a convolution along one dim that reaches far: wide, dilated, padded."""
    kernel, dilation, padding = [1] * s.dims, [1] * s.dims, [0] * s.dims
    d = s.pick(0, 0, s.number(0, s.dims - 1))
    kernel[d], dilation[d] = s.pick(2, 3, 3, 4, 5, 5), s.pick(1, 2, 2, 3)
    span = dilation[d] * (kernel[d] - 1)
    padding[d] = span // 2 if s.flag() else s.number(0, span)
    sizes = {"padding": tuple(padding), "dilation": tuple(dilation)}
    return s.layer("Conv", s.channels, s.number(1, 3), tuple(kernel), **sizes)


def far_conv(s: Spot) -> Source:
    """Returns a far-reaching convolution along the first dim, with as many outputs as inputs.

    Slabs may reach none of a thin block's outputs.
    """
    kernel, dilation = s.pick(3, 5, 5), s.pick(1, 2, 2, 3)
    rest = (1,) * (s.dims - 1)
    sizes = {
        "padding": (dilation * (kernel - 1) // 2, *(0 for _ in rest)),
        "dilation": (dilation, *rest),
    }
    return s.layer("Conv", s.channels, s.number(1, 3), (kernel, *rest), **sizes)


def relu_in_place(s: Spot) -> Source:
    return s.pick(call("nn.ReLU", True), call("nn.LeakyReLU", 0.1, True))


def average(s: Spot) -> Source:
    rest = (1,) * (s.dims - 1)
    return s.layer("AvgPool", (3, *rest), s.pick(1, 1, 2), (1, *(0 for _ in rest)))


def head_conv(s: Spot) -> Source:
    return s.layer("Conv", s.channels, s.number(2, 3), 1)


def in_place(s: Spot) -> Source:
    return s.pick(
        call("nn.ReLU", True), call("nn.LeakyReLU", 0.1, True), call("nn.ELU", 1.0, True),
        call("nn.ReLU"), call("nn.LeakyReLU", 0.1),
    )  # fmt: skip


def smooth(s: Spot) -> Source:
    return s.pick(call("nn.Tanh"), call("nn.SiLU"), call("nn.PReLU"), call("nn.GELU"))


def overlapping(s: Spot) -> Source:
    if s.flag():
        return s.layer("AvgPool", 3, s.number(1, 2), 1)
    kernel = [1] * s.dims
    kernel[s.pick(0, s.number(0, s.dims - 1))] = 3
    return s.layer(s.pick("AvgPool", "MaxPool"), tuple(kernel), 1, tuple(k // 2 for k in kernel))


def norm(s: Spot) -> Source:
    kind = s.pick("Batch", "Instance", "Group")
    if math.prod(s.extents) < 8:
        return call("nn.Identity")
    if kind == "Group":
        return call("nn.GroupNorm", 1, s.channels)
    return s.layer(f"{kind}Norm", s.channels, affine=s.flag())


def up(s: Spot) -> Source:
    return s.layer("ConvTranspose", s.channels, s.number(1, 3), 2, 2)


def residual(s: Spot) -> Source:
    body = call("nn.Sequential", s.layer("Conv", s.channels, s.channels, 3, padding=1), in_place(s))
    return call("Joined", body, s.pick("add", "in place", "cat"))


FAR: Motif = [far_conv, relu_in_place, average]
"""Layers that fuse only on some ranks, if a block is thinner than the convolution's dilation."""

MOTIFS: list[Motif] = [
    [plain_conv, in_place, overlapping],
    [reaching_conv, in_place, overlapping],
    [reaching_conv, in_place, overlapping],
    FAR,
    FAR,
    [conv, in_place, overlapping],
    [plain_conv, norm, in_place],
    [plain_conv, in_place, plain_conv],
    [plain_conv, smooth, head_conv],
    [residual, head_conv],
    [reaching_conv, reaching_conv],
    [norm, smooth],
    [up, in_place, plain_conv],
    [plain_conv],
]
