"""Chains of random blocks, and blocks that hold chains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from support.equivalence import randn
from support.networks.small import initialized
from support.random_networks.blocks import make
from support.random_networks.expressions import piece, pointwise, reduction, reshaped
from support.random_networks.layers import (
    activation,
    attention,
    conv,
    norm,
    padded,
    pool,
    resample,
    shuffled,
    transposed,
)
from support.random_networks.spot import Source, Spot, call

MOST_CHANNELS, MOST_VALUES = 8, 1200
"""Limits of an activation (values of one sample): 200 networks take well under a minute."""

LEAVES: list[Callable[[Spot], Source]] = [
    *[conv] * 4,
    *[transposed] * 2,
    *[pool] * 3,
    *[norm] * 3,
    *[activation] * 3,
    *[resample] * 2,
    shuffled,
    *[padded] * 2,
    *[piece] * 2,
    *[reduction] * 2,
    pointwise,
    reshaped,
    *[attention] * 3,
]


def nested(s: Spot) -> Source:
    """Returns a block that holds chains of others."""
    kind = s.pick("joined", "u", "checkpoint", "twice", "branches")
    if kind == "joined":
        return call("Joined", chain(s, s.number(1, 2)), s.pick("cat", "add", "in place", "times"))
    if kind == "checkpoint":
        return call("Checkpointed", chain(s, s.number(1, 3)))
    if kind == "twice":
        return call("Twice", chain(s, 1), s.flag())
    if kind == "branches":
        return call("Branches", [chain(s, 1), chain(s, 1)], s.pick("stack", "cat"))
    down = s.pick(
        s.layer("Conv", s.channels, 3, 3, stride=2, padding=1),
        s.layer("MaxPool", 2, 2, ceil_mode=True),
        s.layer("AvgPool", 3, 2, 1),
    )
    below = shape_after(down, s.shape)
    body, below = grow(s.numbers, below or s.shape, s.number(0, 2), s.depth - 1)
    up = s.pick(
        s.layer("ConvTranspose", below[1], 2, s.number(2, 3), stride=2),
        call(
            "nn.Sequential",
            call("Expression", "F.interpolate(x, scale_factor=2.0)"),
            s.layer("Conv", below[1], 2, 1),
        ),
    )
    gate = None
    if s.flag() and s.flag():
        gate = call("Gate", Source(f"nn.Conv{s.dims}d"), s.channels, 2, s.flag())
    middle = call("nn.Sequential", *body)
    return call("UShape", down, middle, up, gate, s.pick("pad", "crop", "resize", "linear"))


def chain(s: Spot, count: int) -> Source:
    """Returns a chain inside of a block."""
    return call("nn.Sequential", *grow(s.numbers, s.shape, count, s.depth - 1)[0])


def shape_after(source: Source, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the shape of the result; `None` if torch refuses, or for an unusable result."""
    x = randn(*shape).requires_grad_()
    try:
        y = initialized(make(source))(x * 1.0)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    fits = (
        y.dim() == len(shape)
        and y.shape[0] == shape[0]
        and y.dtype == x.dtype
        and 0 < y.shape[1] <= MOST_CHANNELS
        and 0 < y[0].numel() <= MOST_VALUES
        and y.requires_grad
        and float(y.detach().std()) > 1e-3  # a norm of equal values returns noise
    )
    return tuple(y.shape) if fits and bool(y.isfinite().all()) else None


def grow(
    numbers: random.Random, shape: Sequence[int], count: int, depth: int
) -> tuple[list[Source], tuple[int, ...]]:
    """Returns a chain of blocks, and the shape of its result."""
    shape = tuple(shape)
    blocks = []
    for _ in range(count):
        nest = depth > 0 and numbers.randint(0, 3) == 0
        block = nested if nest else numbers.choice(LEAVES)
        source = block(Spot(numbers, shape, depth))
        after = shape_after(source, shape)
        if after is not None:
            blocks.append(source)
            shape = after
    return blocks, shape
