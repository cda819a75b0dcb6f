"""Chains of random blocks, and blocks that hold chains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from equivalence import randn
from hypothesis import strategies as st
from networks import initialised
from random_blocks import Branches, Checkpointed, Expression, Gate, Joined, Twice, UShape
from random_expressions import piece, pointwise, reduction, reshaped
from random_layers import (
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
from random_spot import Spot
from torch import nn

MOST_CHANNELS, MOST_VALUES = 8, 1200
"""Of an activation, the latter of one sample: 200 networks take well under a minute."""

LEAVES: list[Callable[[Spot], nn.Module]] = [
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


def nested(s: Spot) -> nn.Module:
    """A block that holds chains of others."""
    kind = s.pick("joined", "u", "checkpoint", "twice", "branches")
    inner = s.depth - 1
    if kind == "joined":
        body, _ = grow(s.draw, s.shape, s.number(1, 2), inner)
        return Joined(body, s.pick("cat", "add", "in place", "times"))
    if kind == "checkpoint":
        return Checkpointed(grow(s.draw, s.shape, s.number(1, 3), inner)[0])
    if kind == "twice":
        return Twice(grow(s.draw, s.shape, 1, inner)[0], s.flag())
    if kind == "branches":
        bodies = [grow(s.draw, s.shape, 1, inner)[0] for _ in range(2)]
        return Branches(bodies, s.pick("stack", "cat"))
    down = s.pick(
        s.layer("Conv")(s.channels, 3, 3, stride=2, padding=1),
        s.layer("MaxPool")(2, 2, ceil_mode=True),
        s.layer("AvgPool")(3, 2, 1),
    )
    below = shape_after(down, s.shape)
    body, below = grow(s.draw, below or s.shape, s.number(0, 2), inner)
    up = s.pick(
        s.layer("ConvTranspose")(below[1], 2, s.number(2, 3), stride=2),
        nn.Sequential(
            Expression("F.interpolate(x, scale_factor=2.0)"), s.layer("Conv")(below[1], 2, 1)
        ),
    )
    gate = Gate(s.layer("Conv"), s.channels, 2, s.flag()) if s.flag() and s.flag() else None
    return UShape(down, body, up, gate, s.pick("pad", "crop", "resize", "linear"))


def shape_after(module: nn.Module, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of the result; `None` where torch refuses, or the result is of no use here."""
    x = randn(*shape).requires_grad_()
    try:
        y = initialised(copy.deepcopy(module))(x * 1.0)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    fits = (
        y.dim() == len(shape)
        and y.shape[0] == shape[0]
        and y.dtype == x.dtype
        and 0 < y.shape[1] <= MOST_CHANNELS
        and 0 < y[0].numel() <= MOST_VALUES
        and y.requires_grad
        and float(y.detach().std()) > 1e-3  # of equal values a norm gives noise
    )
    return tuple(y.shape) if fits and bool(y.isfinite().all()) else None


def grow(
    draw: st.DrawFn, shape: Sequence[int], count: int, depth: int
) -> tuple[nn.Sequential, tuple[int, ...]]:
    """A chain of blocks, and the shape of what comes out of it."""
    shape = tuple(shape)
    chain = []
    for _ in range(count):
        nest = depth > 0 and draw(st.integers(0, 3)) == 0
        block = nested if nest else draw(st.sampled_from(LEAVES))
        try:
            module = block(Spot(draw, shape, depth))
        except (RuntimeError, ValueError):
            continue  # reflect padding wider than the input, and the like
        after = shape_after(module, shape)
        if after is not None:
            chain.append(module)
            shape = after
    return nn.Sequential(*chain), shape
