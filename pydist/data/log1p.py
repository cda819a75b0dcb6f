"""Computes mean and standard deviation of log(1 + x) per channel, for normalize="standardize"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class Log1pSums:
    """Sums of log(1 + x) over voxels, which files of a data set add.

    Attributes:
        sums: of log(1 + x), per channel.
        squares: of its square.
        voxels: their number; 0 outside of the training set.
    """

    sums: list[float]
    squares: list[float]
    voxels: int = 0

    @classmethod
    def empty(cls, channels: int) -> Log1pSums:
        """Returns those of no voxels."""
        return cls([0.0] * channels, [0.0] * channels)

    def add(self, values: Sequence[npt.NDArray[Any]] | npt.NDArray[Any]) -> None:
        """Adds voxels, an array for each channel."""
        self.voxels += values[0].size
        for channel, of_channel in enumerate(values):
            with np.errstate(invalid="ignore", divide="ignore"):  # below -1; then there are none
                logs = np.log1p(of_channel, dtype=np.float64)
            self.sums[channel] += float(logs.sum())
            self.squares[channel] += float((logs * logs).sum())


def log1p_statistics(
    found: Iterable[Log1pSums],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of log(1 + x); empty without voxels or logarithms."""
    parts = [each for each in found if each.voxels]
    voxels = sum(each.voxels for each in parts)
    if not voxels:
        return (), ()
    mean = np.sum([each.sums for each in parts], axis=0) / voxels
    square = np.sum([each.squares for each in parts], axis=0) / voxels
    std = np.sqrt(np.maximum(square - mean**2, 0))
    if not np.isfinite(std).all():
        return (), ()
    return tuple(map(float, mean)), tuple(map(float, std))
