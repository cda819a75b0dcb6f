"""Computes affine maps and elastic deformations of one sample, for a box of the result.

A deformation is a cubic B-spline whose control points are displaced at random (Rueckert et al.
1999, IEEE TMI 18, 712). Its values lie between the displacements of the control points around them,
which gives the box of the sample that a box of the result depends on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pydist._loader import native
from pydist.data.augment.steps import Array, Triple, box_of
from pydist.partition import Box

Positions: TypeAlias = npt.NDArray[np.float64]

_MARGIN = 1e-6
"""Voxels added to bounds of positions, far more than the rounding errors of both."""

_SLAB = 1 << 15
"""Voxels computed at a time, so that their positions stay in the cache."""


def rotation(angles: Sequence[float]) -> Positions:
    """Returns the product of the rotations in the planes (1, 2), (0, 2), (0, 1) by `angles`."""
    product = np.eye(3)
    for angle, (a, b) in zip(angles, ((1, 2), (0, 2), (0, 1)), strict=True):
        each = np.eye(3)
        each[a, a] = each[b, b] = math.cos(angle)
        each[a, b], each[b, a] = -math.sin(angle), math.sin(angle)
        product = each @ product
    return product


@dataclass(frozen=True)
class Elastic:
    """Smooth random displacement that each voxel gets.

    Attributes:
        largest: of the displacements along each dim, in voxels.
        spacing: of the control points, in voxels.
        keys: of the random numbers, one a dim.
        extents: of the result.
    """

    largest: float
    spacing: float
    keys: tuple[int, int, int]
    extents: Triple

    def controls(self, box: Box) -> tuple[Positions, list[int]]:
        """Returns the displaced control points [3, ...] around a box, and the first one's index."""
        first = [int(a // self.spacing) for a in box.lo]
        after = [int((b - 1) // self.spacing) + 4 for b in box.hi]
        lattice = [int((n - 1) // self.spacing) + 4 for n in self.extents]
        sizes = [b - a for a, b in zip(first, after, strict=True)]
        points = torch.empty((3, *sizes), dtype=torch.float64, device="cpu")
        for along, key in zip(points, self.keys, strict=True):
            native.keyed_uniform(along[None], key, (0, *first), (1, *lattice))
        return self.largest * (2 * points.numpy() - 1), first

    def bounds(self, box: Box) -> tuple[list[float], list[float]]:
        """Returns bounds of the displacements in a box along each dim."""
        points, _ = self.controls(box)
        flat = points.reshape(3, -1)
        return flat.min(1).tolist(), flat.max(1).tolist()

    def __call__(self, box: Box) -> Positions:
        """Returns the displacements [3, D, H, W] of the voxels of a box."""
        field, first = self.controls(box)
        for dim in (2, 1, 0):
            place = np.arange(box.lo[dim], box.hi[dim]) / self.spacing
            whole = np.floor(place)
            total: Any = 0.0
            for tap, weight in enumerate(_spline(place - whole)):
                index = whole.astype(np.intp) - first[dim] + tap
                along = weight.reshape(-1, *[1] * (2 - dim))
                total = total + np.take(field, index, axis=1 + dim) * along
            field = total
        return field


def _spline(t: Positions) -> tuple[Positions, Positions, Positions, Positions]:
    """Returns the weights of the four control points around a place, t after the second one."""
    s = 1 - t
    inner = (4 - 6 * t**2 + 3 * t**3) / 6
    return s**3 / 6, inner, (4 - 6 * s**2 + 3 * s**3) / 6, t**3 / 6


@dataclass(frozen=True)
class Warp:
    """Change that takes each voxel from another place of the sample before.

    Voxel o is at `matrix` @ (o - `center`) + `place`, plus its displacement. Values are
    interpolated linearly, labels (integers) are those of the nearest voxel. Beyond its edges a
    sample has the values at its edges.

    Attributes:
        matrix: [3, 3], voxels of the sample per voxel of the result.
        center: the voxel of the result about which the map is linear.
        place: of the center in the sample.
        extents: of the sample.
        elastic: the displacements; None without any.
    """

    matrix: Positions
    center: tuple[float, ...]
    place: tuple[float, ...]
    extents: Triple
    elastic: Elastic | None
    moves = True

    def needs(self, box: Box) -> Box:
        """Returns the box of the sample whose voxels are interpolated."""
        least, most = self.elastic.bounds(box) if self.elastic else ([0.0] * 3, [0.0] * 3)
        found = []
        for dim, n in enumerate(self.extents):
            ends = [
                sorted((row * (a - c), row * (b - 1 - c)))
                for row, a, b, c in zip(
                    self.matrix[dim].tolist(), box.lo, box.hi, self.center, strict=True
                )
            ]
            low = self.place[dim] + sum(end[0] for end in ends) + least[dim] - _MARGIN
            high = self.place[dim] + sum(end[1] for end in ends) + most[dim] + _MARGIN
            first = min(max(math.floor(low), 0), max(n - 2, 0))  # as `_linear` takes pairs
            found.append((first, min(max(math.floor(high), 0) + 2, n)))
        return box_of(found)

    def __call__(self, x: Array, has: Box, wanted: Box) -> Array:
        """Interpolates the values."""
        x = np.ascontiguousarray(x)
        sizes = wanted.shape
        found = np.empty((len(x), *sizes), x.dtype)
        planes = max(1, _SLAB // math.prod(sizes[1:]))
        for start in range(0, sizes[0], planes):
            stop = min(start + planes, sizes[0])
            slab = Box(
                (wanted.lo[0] + start, *wanted.lo[1:]), (wanted.lo[0] + stop, *wanted.hi[1:])
            )
            places = self._places(slab)
            take = _nearest if x.dtype.kind in "iu" else _linear
            take(x, has, places, self.extents, found[:, start:stop])
        return found

    def _places(self, box: Box) -> list[Positions]:
        """Returns the places in the sample of the voxels of a box, by dim; within the sample."""
        moved = self.elastic(box) if self.elastic else None
        found = []
        for dim, n in enumerate(self.extents):
            parts = [
                row * (np.arange(a, b) - c)
                for row, a, b, c in zip(self.matrix[dim], box.lo, box.hi, self.center, strict=True)
            ]
            # The same operations for each voxel, whatever the box: nearest voxels do not differ.
            across = (self.place[dim] + parts[0])[:, None] + parts[1]
            place = across[:, :, None] + parts[2]
            if moved is not None:
                place += moved[dim]
            found.append(np.clip(place, 0, n - 1, out=place))
        return found


def _nearest(x: Array, has: Box, places: list[Positions], extents: Triple, out: Array) -> None:
    index = np.zeros(out.shape[1:], np.intp)
    for place, first, stride in zip(places, has.lo, _strides(x), strict=True):
        index += (np.floor(place + 0.5).astype(np.intp) - first) * stride
    for channel, room in zip(x, out, strict=True):
        np.take(channel.reshape(-1), index, out=room, mode="clip")


def _linear(x: Array, has: Box, places: list[Positions], extents: Triple, out: Array) -> None:
    index = np.zeros(out.shape[1:], np.intp)
    steps, uppers = [], []
    for place, first, stride, n in zip(places, has.lo, _strides(x), extents, strict=True):
        below = np.floor(place)
        np.minimum(below, max(n - 2, 0), out=below)  # the last voxel is the upper one of a pair
        uppers.append((place - below).astype(x.dtype))
        index += (below.astype(np.intp) - first) * stride
        steps.append(stride if n > 1 else 0)
    corners = [index + offset for offset in _corners(steps)]
    for channel, room in zip(x, out, strict=True):
        values = [np.take(channel.reshape(-1), corner, mode="clip") for corner in corners]
        for upper in reversed(uppers):
            for low, high in zip(values[::2], values[1::2], strict=True):
                np.subtract(high, low, out=high)
                np.multiply(high, upper, out=high)
                np.add(low, high, out=low)
            values = values[::2]
        room[...] = values[0]


def _corners(steps: Sequence[int]) -> Iterator[int]:
    """Yields the offsets of the eight voxels around a place; the last dim changes first."""
    for number in range(8):
        yield sum(step for dim, step in enumerate(steps) if number >> (2 - dim) & 1)


def _strides(x: Array) -> tuple[int, int, int]:
    _, _, height, width = x.shape
    return height * width, width, 1
