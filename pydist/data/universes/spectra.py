"""Estimates the power spectrum of a field, and its rms in spheres."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydist.data.universes.cosmology import top_hat
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
        expected: mean over the same modes of a given P(k), if one was given.
    """

    k: Array
    power: Array
    modes: Array
    expected: Array | None = None


def power_spectrum(
    grid: PeriodicCube, contrast: Array, window: int = 0, theory: Any | None = None
) -> Spectrum:
    """Computes P(k) = |delta_k|^2 L^3 / N^6 of a density contrast.

    Args:
        grid: the grid.
        contrast: delta, [N, N, N].
        window: p of the assignment to divide out, prod_i sinc(k_i L / 2N)^(2p): 0 none (a field),
            1 nearest grid point, 2 cloud in cell.
        theory: a P(k) to average over the same modes, for comparison without binning error.

    Returns:
        One entry per bin, from the fundamental mode up to the Nyquist mode.
    """
    xp, n = grid.xp, grid.width
    axes = grid.mode_numbers
    power = abs(grid.to_modes(contrast)).astype("float64") ** 2 * grid.volume / n**6
    for numbers in axes if window else ():
        power /= xp.sinc(numbers / n) ** (2 * window)
    # Planes inside the half transform also represent their mirror images.
    inner = (axes[2] > 0) & (2 * axes[2] < n)
    weight = xp.broadcast_to(xp.where(inner, 2.0, 1.0), power.shape).ravel()
    k = grid.by_mode(lambda k: k).ravel()
    bins = xp.floor(k / grid.fundamental + 0.5).astype("int64")
    count = n // 2 + 1

    def total(values: Array) -> Array:
        return xp.bincount(bins, weights=weight * values, minlength=count)[1:count]

    modes = total(xp.ones_like(k))
    expected = None if theory is None else total(grid.by_mode(theory).ravel()) / modes
    return Spectrum(total(k) / modes, total(power.ravel()) / modes, modes, expected)


def rms_in_spheres(grid: PeriodicCube, modes: Array, radius: float) -> float:
    """Computes the rms of a contrast averaged over balls of `radius` (Mpc/h); sigma_8 for 8.

    Args:
        grid: the cube.
        modes: Fourier modes of the contrast, as of `Grid.to_modes`, [N, N, N // 2 + 1].
        radius: of the balls, Mpc/h.
    """
    smooth = grid.to_field(modes * grid.by_mode(lambda k: top_hat(k * radius)))
    return math.sqrt(float((smooth.astype("float64") ** 2).mean()))
