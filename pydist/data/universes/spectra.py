"""Estimates the power spectrum of a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydist.data.universes.fields import PeriodicCube

Array = Any
"""A NumPy or a CuPy array."""


@dataclass(frozen=True)
class Spectrum:
    """Power spectrum that was measured, in bins as wide as the fundamental mode.

    Attributes:
        k: mean wavenumber of the bin's modes, h/Mpc.
        power: mean power, (Mpc/h)^3.
        modes: number of independent real modes in the bin.
    """

    k: Array
    power: Array
    modes: Array


def power_spectrum(grid: PeriodicCube, contrast: Array) -> Spectrum:
    """Computes P(k) = |delta_k|^2 L^3 / N^6 of a density contrast.

    Args:
        grid: the grid.
        contrast: delta, [N, N, N].

    Returns:
        One entry per bin, from the fundamental mode up to the Nyquist mode.
    """
    xp, n = grid.xp, grid.width
    power = abs(grid.to_modes(contrast)).astype("float64") ** 2 * grid.volume / n**6
    # Planes inside the half transform also represent their mirror images.
    last = grid.mode_numbers[2]
    inner = (last > 0) & (2 * last < n)
    weight = xp.broadcast_to(xp.where(inner, 2.0, 1.0), power.shape).ravel()
    k = grid.by_mode(lambda k: k).ravel()
    bins = xp.floor(k / grid.fundamental + 0.5).astype("int64")
    count = n // 2 + 1

    def total(values: Array) -> Array:
        return xp.bincount(bins, weights=weight * values, minlength=count)[1:count]

    modes = total(xp.ones_like(k))
    return Spectrum(total(k) / modes, total(power.ravel()) / modes, modes)
