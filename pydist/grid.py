"""Describes the geometry of the grid of ranks: named axes, sizes, coordinates and groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SPATIAL_AXES = ("depth", "height", "width")
CHANNEL_AXIS = "channel"
OTHER_AXES = {
    CHANNEL_AXIS: "the layers' channels",
}
"""The other axes that divide the ranks of a sample, and what ranks along them hold parts of.

To add an axis, add a line here; see `docs/extending.md`.
"""


def axes_by_dim(dims: int) -> dict[int, str]:
    """Returns the axis that cuts each spatial dim of a batch [N, C, ...], by dim.

    An image [N, C, H, W] has height and width, and a line [N, C, W] has width.

    Args:
        dims: number of spatial dims, 1 to 3.
    """
    return dict(enumerate(SPATIAL_AXES[-dims:], start=2))


SAMPLE_AXES = (*OTHER_AXES, *SPATIAL_AXES)
"""The axes over which one sample is split."""
AXES = ("data", *SAMPLE_AXES)
"""All axes, the slowest first."""


@dataclass(frozen=True)
class Grid:
    """Grid that arranges ranks along named axes.

    Ranks count row by row, the last axis fastest:
    ``rank = (((data * C + channel) * D + depth) * H + height) * W + width``.

    Attributes:
        shape: the size of each of `AXES`.
    """

    shape: tuple[int, ...]
    _sizes: dict[tuple[str, ...], int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Grid:
        """Returns the grid with these sizes; an axis that is not named has one rank."""
        return cls(tuple(sizes.get(axis, 1) for axis in AXES))

    def __str__(self) -> str:
        split = [f"{axis} {n}" for axis, n in zip(AXES, self.shape, strict=True) if n > 1]
        return " × ".join(split) or "1 rank"

    def size(self, axes: Sequence[str] = AXES) -> int:
        """Returns the number of ranks that differ along `axes` only."""
        axes = tuple(axes)
        found = self._sizes.get(axes)
        if found is None:
            found = math.prod(self.shape[AXES.index(axis)] for axis in set(axes))
            self._sizes[axes] = found
        return found

    def batch_dims(self, dims: int) -> int:
        """Returns the number of dims of the plain batches that the grid cuts.

        These are the network's own, as in [N, C, H, W], if an axis divides them; else volumes.

        Args:
            dims: number of spatial dims of the network.
        """
        divides = any(self.size((axis,)) > 1 for axis in axes_by_dim(dims).values())
        return 2 + (dims if divides else len(SPATIAL_AXES))

    def split(self, axes: Sequence[str] = AXES) -> tuple[str, ...]:
        """Returns the axes among `axes` with several ranks, in the order of `AXES`."""
        return tuple(a for a in AXES if a in axes and self.size((a,)) > 1)

    def coords(self, index: int, axes: Sequence[str] = AXES) -> dict[str, int]:
        """Returns the coordinates of the rank with this index among the ranks along `axes`."""
        found = {}
        for axis in reversed(axes):
            index, found[axis] = divmod(index, self.size((axis,)))
        return {axis: found[axis] for axis in axes}

    def index(self, coords: Mapping[str, int], axes: Sequence[str] = AXES) -> int:
        """Returns the index of coordinates among the ranks along `axes`; inverts `coords`."""
        index = 0
        for axis in axes:
            index = index * self.size((axis,)) + coords[axis]
        return index

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Returns the ranks of every group along `axes` in the grid, in order."""
        others = tuple(a for a in AXES if a not in axes)
        found: list[list[int]] = [[] for _ in range(self.size(others))]
        for rank in range(self.size()):
            found[self.index(self.coords(rank), others)].append(rank)
        return found
