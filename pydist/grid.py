"""The grid of ranks with its named axes, without the ranks: sizes, coordinates, groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SPATIAL_AXES = ("depth", "height", "width")
SAMPLE_AXES = ("channel", *SPATIAL_AXES)
"""The axes over which one sample is split: those of its dims."""
AXES = ("data", *SAMPLE_AXES)
"""All axes, the slowest first. An axis more is a name here; see `docs/extending.md`."""


@dataclass(frozen=True)
class Grid:
    """How many ranks there are along each axis.

    Ranks count row by row, the last axis fastest:
    ``rank = (((data * C + channel) * D + depth) * H + height) * W + width``.

    Attributes:
        shape: the size of each of `AXES`.
    """

    shape: tuple[int, ...]
    _sizes: dict[tuple[str, ...], int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Grid:
        """The grid with these sizes; an axis that is not named has one rank."""
        return cls(tuple(sizes.get(axis, 1) for axis in AXES))

    def __str__(self) -> str:
        split = [f"{axis} {n}" for axis, n in zip(AXES, self.shape, strict=True) if n > 1]
        return " × ".join(split) or "1 rank"

    def size(self, axes: Sequence[str] = AXES) -> int:
        """Number of ranks that differ along `axes` only."""
        axes = tuple(axes)
        found = self._sizes.get(axes)
        if found is None:
            found = math.prod(self.shape[AXES.index(axis)] for axis in set(axes))
            self._sizes[axes] = found
        return found

    def split(self, axes: Sequence[str] = AXES) -> tuple[str, ...]:
        """Those of `axes` along which there are several ranks, in the order of `AXES`."""
        return tuple(a for a in AXES if a in axes and self.size((a,)) > 1)

    def coords(self, index: int, axes: Sequence[str] = AXES) -> dict[str, int]:
        """The coordinates of the rank that has this index among those along `axes`."""
        found = {}
        for axis in reversed(axes):
            index, found[axis] = divmod(index, self.size((axis,)))
        return {axis: found[axis] for axis in axes}

    def index(self, coords: Mapping[str, int], axes: Sequence[str] = AXES) -> int:
        """The index of coordinates among the ranks along `axes`; the inverse of `coords`."""
        index = 0
        for axis in axes:
            index = index * self.size((axis,)) + coords[axis]
        return index

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks of each group along `axes`, in order; of the whole grid."""
        others = tuple(a for a in AXES if a not in axes)
        found: list[list[int]] = [[] for _ in range(self.size(others))]
        for rank in range(self.size()):
            found[self.index(self.coords(rank), others)].append(rank)
        return found
