"""Changes of one sample, each computed for a box of its result from the box that it needs.

Arrays are [C, D, H, W]; boxes are those of the last three dims, in indices of the whole sample. A
result does not depend on the box for which it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pydist._loader import native
from pydist.partition import Box

Array: TypeAlias = npt.NDArray[Any]
Triple: TypeAlias = tuple[int, int, int]
Range: TypeAlias = tuple[Array, Array]

_TRUNCATE = 4.0
"""Standard deviations at which a Gaussian filter ends, as in SciPy."""


class Change(Protocol):
    """Change that has the numbers that were drawn for it.

    Attributes:
        moves: whether it moves voxels, and so changes labels as well.
    """

    moves: bool

    def needs(self, box: Box) -> Box:
        """Returns the box of the sample before that a box of the result depends on."""
        ...

    def __call__(self, x: Array, has: Box, wanted: Box) -> Array:
        """Computes the values of the box `wanted` from those of `has`, as `needs` names it."""
        ...


@dataclass(frozen=True)
class Crop:
    """Change that takes a box of the sample."""

    first: Triple
    moves = True

    def needs(self, box: Box) -> Box:
        """Returns the box at its place in the sample."""
        return box_of((a + f, b + f) for a, b, f in zip(box.lo, box.hi, self.first, strict=True))

    def __call__(self, x: Array, has: Box, wanted: Box) -> Array:
        """Returns the values."""
        return x


@dataclass(frozen=True)
class Turn:
    """Change that exchanges two dims of equal extents, and reverses dims.

    Attributes:
        order: the dim of the sample before that each dim comes from.
        reverses: whether each dim is reversed.
        extents: of the result.
    """

    order: Triple
    reverses: tuple[bool, bool, bool]
    extents: Triple
    moves = True

    def needs(self, box: Box) -> Box:
        """Returns the box before the turn."""
        found = [(0, 0)] * 3
        for dim, (a, b) in enumerate(zip(box.lo, box.hi, strict=True)):
            n = self.extents[dim]
            found[self.order[dim]] = (n - b, n - a) if self.reverses[dim] else (a, b)
        return box_of(found)

    def __call__(self, x: Array, has: Box, wanted: Box) -> Array:
        """Turns the values."""
        turned = x.transpose(0, *(1 + dim for dim in self.order))
        return np.flip(turned, tuple(1 + dim for dim in range(3) if self.reverses[dim]))


class _InPlace:
    """Change that computes each voxel from itself."""

    moves = False

    def needs(self, box: Box) -> Box:
        """Returns the box."""
        return box


@dataclass(frozen=True)
class Values(_InPlace):
    """Change that computes a function of each value."""

    function: Callable[[Array], Array]

    def __call__(self, x: Array, has: Box, wanted: Box) -> Array:
        """Computes the function."""
        return self.function(x)


@dataclass(frozen=True)
class Noise(_InPlace):
    """Change that adds Gaussian noise, a function of keys and of the voxel (Box and Muller)."""

    deviation: float
    keys: tuple[int, int]
    extents: Triple

    def __call__(self, x: Array, has: Box, wanted: Box) -> Array:
        """Adds the noise."""
        shape = (len(x), *self.extents)
        first, second = (torch.empty(x.shape, dtype=torch.float64) for _ in self.keys)
        for out, key in zip((first, second), self.keys, strict=True):
            native.keyed_uniform(out, key, (0, *wanted.lo), shape)
        # Uniform numbers are less than 1, so that no radius is infinite; functions of single
        # precision are several times faster.
        noise = np.log((1 - first.numpy()).astype(x.dtype))
        noise *= -2 * self.deviation**2
        np.sqrt(noise, out=noise)
        noise *= np.cos((2 * np.pi * second.numpy()).astype(x.dtype))
        noise += x
        return noise


@dataclass(frozen=True)
class WeightedSum:
    """Change that sums voxels, with weights, along each dim in turn.

    Attributes:
        rows: returns the indices and the weights, [taps, n] each, of positions [n] of a dim.
    """

    rows: Callable[[int, npt.NDArray[np.int64]], tuple[Array, Array]]
    moves = False

    def needs(self, box: Box) -> Box:
        """Returns the box of all voxels that are summed."""
        bounds = enumerate(zip(box.lo, box.hi, strict=True))
        found = (self.rows(dim, np.arange(a, b))[0] for dim, (a, b) in bounds)
        return box_of((int(each.min()), int(each.max()) + 1) for each in found)

    def __call__(self, x: Array, has: Box, wanted: Box) -> Array:
        """Computes the sums."""
        for dim in range(3):
            places, weights = self.rows(dim, np.arange(wanted.lo[dim], wanted.hi[dim]))
            total: Array | None = None
            for place, weight in zip(places - has.lo[dim], weights, strict=True):
                along = weight.astype(x.dtype).reshape(-1, *[1] * (2 - dim))
                part = np.take(x, place, axis=1 + dim)
                part *= along
                total = part if total is None else np.add(total, part, out=total)
            assert total is not None
            x = total
        return x


def blur(deviation: float, extents: Triple) -> WeightedSum:
    """Returns a Gaussian filter; beyond its edges a sample has the values at its edges.

    Args:
        deviation: standard deviation in voxels.
        extents: of the sample.
    """
    deviation = max(deviation, 1e-3)  # the least one may be 0
    radius = int(_TRUNCATE * deviation + 0.5)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / deviation) ** 2)
    weights /= weights.sum()

    def rows(dim: int, at: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        places = np.clip(at + offsets[:, None], 0, extents[dim] - 1)
        return places, np.broadcast_to(weights[:, None], places.shape)

    return WeightedSum(rows)


def low_resolution(factor: float, extents: Triple) -> WeightedSum:
    """Returns the nearest voxels at a lower resolution, interpolated linearly.

    Args:
        factor: of the resolution, at most 1.
        extents: of the sample.
    """
    coarse = [max(1, round(n * factor)) for n in extents]

    def rows(dim: int, at: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        n, m = extents[dim], coarse[dim]
        place = np.clip((at + 0.5) * (m / n) - 0.5, 0, m - 1)
        first = np.floor(place).astype(np.int64)
        both = np.stack([first, np.minimum(first + 1, m - 1)])
        upper = place - first
        nearest = np.minimum(((both + 0.5) * (n / m)).astype(np.int64), n - 1)
        return nearest, np.stack([1 - upper, upper])

    return WeightedSum(rows)


def curved(x: Array, exponent: float, bounds: Range | None, *, inverted: bool = False) -> Array:
    """Returns lower + r * ((x - lower) / r) ** exponent, with the range r = upper - lower.

    Values below the range are curved symmetrically about its lower end. In a channel of one value,
    which stays, r is 1.

    Args:
        x: the values.
        exponent: of the distance to the lower end.
        bounds: lower and upper end of each channel, [C, 1, 1, 1]; by default 0 and 1.
        inverted: whether it is the distance to the upper end.
    """
    lower, upper = (np.zeros(1), np.ones(1)) if bounds is None else bounds
    if inverted and bounds is not None:
        start, extent = upper.astype(x.dtype), (lower - upper).astype(x.dtype)
    else:  # without bounds both are the same
        start, extent = lower.astype(x.dtype), (upper - lower).astype(x.dtype)
    extent[extent == 0] = 1
    share = x - start
    share /= extent
    powered = np.abs(share)
    np.power(powered, x.dtype.type(exponent), out=powered)
    np.copysign(powered, share, out=powered)
    powered *= extent
    powered += start
    return powered


def stretched(x: Array, factor: float, bounds: Range | None) -> Array:
    """Returns values with their distance to the middle of the range multiplied by a factor.

    None of them leaves the range, if it was in there before.

    Args:
        x: the values.
        factor: of the distance.
        bounds: lower and upper end of each channel, [C, 1, 1, 1]; by default the middle is 0, and
            there are no ends.
    """
    if bounds is None:
        return x * x.dtype.type(factor)
    lower, upper = (each.astype(x.dtype) for each in bounds)
    middle = (lower + upper) / 2
    found = (x - middle) * x.dtype.type(factor) + middle
    return np.clip(found, np.minimum(x, lower), np.maximum(x, upper), out=found)


def box_of(bounds: Iterable[tuple[int, int]]) -> Box:
    """Returns the box that has an interval (first, after the last) in each dim."""
    lo, hi = zip(*bounds, strict=True)
    return Box(lo, hi)


def boxes_of(changes: Sequence[Change], box: Box) -> list[Box]:
    """Returns the boxes that each of the changes needs for a box of the result, and this box."""
    found = [box]
    for change in reversed(changes):
        found.append(change.needs(found[-1]))
    return found[::-1]
