"""Sliding windows over a volume: their places, and weights that sum to 1 in each voxel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pydist.errors import UsageError
from pydist.partition import Box, split_extent

_SIGMA = 0.125
"""Standard deviation of the weights, as a fraction of a window's side, as in nnU-Net and MONAI."""


@dataclass(frozen=True)
class Sliding:
    """Options that define a prediction by sliding windows.

    For volumes whose activations do not fit into memory. A window has no context beyond its border,
    so results differ from those of the full volume.

    Attributes:
        window: voxels along each side, a multiple of the network's downsampling factor (8).
        overlap: fraction shared by neighboring windows, which are averaged there with weights that
            decrease toward a window's border.
    """

    window: int
    overlap: float = 0.25

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or not isinstance(self.overlap, (int, float)):
            raise UsageError(
                f"window={self.window!r}, overlap={self.overlap!r}: a whole number of voxels, and "
                "a part in [0, 1)"
            )
        if not 1 <= self.window < 1 << 31 or not 0 <= self.overlap < 1:
            raise UsageError(
                f"window={self.window}, overlap={self.overlap}: at least 1 voxel and below 2**31, "
                "and a part in [0, 1)"
            )

    @classmethod
    def chosen(cls, window: int | None, overlap: float | None) -> Sliding | None:
        """Returns the options that a command was given; None without windows."""
        if window is None:
            return None
        return cls(window) if overlap is None else cls(window, overlap)

    def check(self, multiple: int) -> None:
        """Raises `UsageError` unless the window's side is a multiple of what a network needs."""
        if self.window % multiple:
            raise UsageError(f"a window of {self.window} voxels is not a multiple of {multiple}")


class Windows:
    """Windows of equal extents that cover a volume.

    They stand where MONAI's `sliding_window_inference` puts them. A window's weight is a Gaussian
    around its center, divided by the sum over all windows. Both are products over the dims, so that
    the sum needs no volume.

    Args:
        extents: of the volume, such as (D, H, W).
        window: extents of a window, at most those of the volume.
        overlap: fraction shared by neighbors, in [0, 1).
    """

    def __init__(self, extents: Sequence[int], window: Sequence[int], overlap: float) -> None:
        self.extents, self.window = tuple(extents), tuple(window)
        pairs = list(zip(self.extents, self.window, strict=True))
        self._starts = [_starts(n, w, overlap) for n, w in pairs]
        self._weights = [_weights(n, w, at) for (n, w), at in zip(pairs, self._starts, strict=True)]
        self._places = list(itertools.product(*(range(len(each)) for each in self._starts)))

    @classmethod
    def whole(cls, extents: Sequence[int]) -> Windows:
        """Returns a single window, the volume itself."""
        return cls(extents, extents, 0.0)

    def __len__(self) -> int:
        return len(self._places)

    def start(self, number: int) -> tuple[int, ...]:
        """Returns the first voxel of a window."""
        place = self._places[number]
        return tuple(starts[i] for starts, i in zip(self._starts, place, strict=True))

    def weighted(self, scores: Tensor, number: int, part: Box) -> Tensor:
        """Returns scores multiplied by their weights.

        Args:
            scores: [classes, ...] of a part of the window, in host memory.
            number: of the window.
            part: the part, in indices of the window.
        """
        found = scores
        for dim, (weights, i) in enumerate(zip(self._weights, self._places[number], strict=True)):
            if len(weights) == 1:
                continue  # 1 in each voxel
            own = weights[i, part.lo[dim] : part.hi[dim]].to(scores.dtype)
            own = own.view([-1 if d == dim else 1 for d in range(len(self.window))])
            found = found * own if found is scores else found.mul_(own)
        return found


def _starts(extent: int, window: int, overlap: float) -> list[int]:
    """Returns where windows start along a dim: the last one ends where the volume does."""
    step = max(1, int(window * (1 - overlap)))
    count = 1 + math.ceil((extent - window) / step)
    return [min(i * step, extent - window) for i in range(count)]


def _weights(extent: int, window: int, starts: Sequence[int]) -> Tensor:
    """Returns the weights along a dim, [windows, window] float64; they sum to 1 in each voxel."""
    place = torch.arange(window, dtype=torch.float64) - (window - 1) / 2
    weight = torch.exp(-0.5 * (place / (_SIGMA * window)) ** 2)
    total = torch.zeros(extent, dtype=torch.float64)
    for start in starts:
        total[start : start + window] += weight
    return torch.stack([weight / total[start : start + window] for start in starts])


def regions(extents: Sequence[int], parts: int) -> list[Box]:
    """Divides a volume into boxes of about equal size, one for each rank; some may be empty.

    Each cut is along the longest dim, so that boxes are as compact as possible.
    """

    def divided(box: Box, count: int) -> list[Box]:
        if count == 1:
            return [box]
        factor = next(n for n in range(2, count + 1) if count % n == 0)
        dim = max(range(len(box.shape)), key=lambda d: box.shape[d])
        cuts = split_extent(box.shape[dim], factor)
        found = []
        for part in range(factor):
            lo, hi = list(box.lo), list(box.hi)
            lo[dim], hi[dim] = (box.lo[dim] + n for n in cuts.interval(part))
            found += divided(Box(lo, hi), count // factor)
        return found

    return divided(Box([0] * len(extents), extents), parts)
