"""Draws random density fields on a periodic grid, and computes how they displace particles.

The same code runs on NumPy and CuPy: every function uses the array module of the `PeriodicCube`.
Fields have `PeriodicCube.dtype`; Fourier transforms are those of `rfftn`, so their last axis is
half.

Sources:
    Zel'dovich 1970, A&A 5, 84; Bouchet, Colombi, Hivon & Juszkiewicz 1995, A&A 296, 575;
    Scoccimarro 1998, MNRAS 299, 1097 (Lagrangian perturbation theory to second order).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from pydist.errors import UsageError

Array = Any
"""A NumPy or a CuPy array."""


@dataclass(frozen=True)
class PeriodicCube:
    """Periodic cube that is divided into cells.

    Attributes:
        width: cells along a side (N).
        side: length of a side, Mpc/h (L).
        xp: the array module, NumPy or CuPy.
        dtype: "float32" or "float64", of all real fields.
    """

    width: int
    side: float
    xp: ModuleType = np
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.width < 2 or self.side <= 0 or self.dtype not in ("float32", "float64"):
            raise UsageError(
                f"grid of {self.width} cells, {self.side} Mpc/h, {self.dtype}: at least 2 cells, "
                "a positive length and float32 or float64 are needed"
            )

    @property
    def cell(self) -> float:
        """Length that a side of a cell has, Mpc/h."""
        return self.side / self.width

    @property
    def volume(self) -> float:
        """Volume that the cube has, (Mpc/h)^3."""
        return self.side**3

    @property
    def fundamental(self) -> float:
        """Smallest wavenumber that the cube holds, 2 pi / L, h/Mpc."""
        return 2 * math.pi / self.side

    @cached_property
    def mode_numbers(self) -> tuple[Array, Array, Array]:
        """Integer mode numbers that a half transform has along its three axes, to be broadcast."""
        n = self.width
        full = np.fft.fftfreq(n, 1 / n).round().astype(np.int32)
        half = np.arange(n // 2 + 1, dtype=np.int32)
        axes = full[:, None, None], full[None, :, None], half[None, None, :]
        return tuple(self.xp.asarray(a) for a in axes)

    @cached_property
    def derivatives(self) -> tuple[Array, Array, Array]:
        """Wavenumbers k along the three axes that odd derivatives use: 0 at the Nyquist mode.

        A real field's Nyquist mode is a cosine sampled at its extremes; its derivative is zero on
        the grid. Left in, div Psi misses -delta by 6 to 8 %.
        """
        nyquist = self.width // 2 if self.width % 2 == 0 else self.width
        return tuple(
            self.xp.where(abs(n) == nyquist, 0, n * self.fundamental).astype(self.dtype)
            for n in self.mode_numbers
        )

    def by_mode(self, function: Callable[[Array], Array]) -> Array:
        """Evaluates a function of k on the half transform's modes, in `dtype`.

        The function is evaluated only once for each of the 3 (N/2)^2 possible k^2: for 512^3 cells
        that is 0.3 % of the modes.
        """
        nx, ny, nz = self.mode_numbers
        squares = nx * nx + ny * ny + nz * nz
        k = self.xp.sqrt(self.xp.arange(3 * (self.width // 2) ** 2 + 1, dtype="float64"))
        return function(k * self.fundamental).astype(self.dtype)[squares]

    def to_modes(self, values: Array) -> Array:
        """Computes the half Fourier transform of a real field, in this grid's precision."""
        modes = self.xp.fft.rfftn(values)
        return modes.astype("complex64" if self.dtype == "float32" else "complex128", copy=False)

    def to_field(self, modes: Array) -> Array:
        """Computes the real field of a half Fourier transform, in this grid's precision."""
        shape = (self.width,) * 3
        field = self.xp.fft.irfftn(modes, s=shape, axes=(0, 1, 2))
        return field.astype(self.dtype, copy=False)


def white_noise(grid: PeriodicCube, generator: np.random.Generator) -> Array:
    """Draws independent normal numbers, one per cell.

    NumPy always draws them on the host, so that a seed means the same universe on CPU and GPU (up
    to rounding). NumPy guarantees a generator's bits, but not how it makes normal numbers of them;
    if that changes, the same seed gives another universe.
    """
    noise = generator.standard_normal((grid.width,) * 3, dtype=np.dtype(grid.dtype))
    return grid.xp.asarray(noise)


def gaussian_modes(grid: PeriodicCube, noise: Array, power: Callable[[Array], Array]) -> Array:
    """Computes modes of a Gaussian contrast: delta_k = w_k sqrt(P(k) N^3 / L^3), delta_0 = 0.

    Args:
        grid: the grid.
        noise: white noise w, [N, N, N].
        power: P(k), k in h/Mpc, P in (Mpc/h)^3.

    Returns:
        delta_k, [N, N, N/2 + 1], complex.
    """
    modes = grid.to_modes(noise)

    def amplitude(k: Array) -> Array:
        root = grid.xp.zeros_like(k)
        root[1:] = grid.xp.sqrt(power(k[1:]) / grid.cell**3)
        return root

    modes *= grid.by_mode(amplitude)
    return modes


@dataclass(frozen=True)
class Displacement:
    """Displacement that moves each particle from its lattice point, at D = 1.

    The position at growth D is x = q + D Psi1 + (3/7) D^2 omega_m(z)^(-1/143) Psi2, modulo L.

    Attributes:
        grid: the grid; particles start at its points.
        first: Psi1 [3, N, N, N], Mpc/h (Zel'dovich).
        second: Psi2 [3, N, N, N], Mpc/h.
    """

    grid: PeriodicCube
    first: Array
    second: Array

    def positions(self, growth: float, omega_m_z: float, slabs: int = 8) -> Iterator[Array]:
        """Computes positions in cells, not wrapped, one slab of the lattice at a time.

        Args:
            growth: D(z), 1 today.
            omega_m_z: matter density as a fraction of the critical one, at z.
            slabs: number of slabs; the caller needs memory for one at a time.

        Yields:
            [3, rows, N, N] for successive rows of lattice planes.
        """
        grid, xp = self.grid, self.grid.xp
        n = grid.width
        scale1 = growth / grid.cell
        scale2 = 3 / 7 * growth**2 * omega_m_z ** (-1 / 143) / grid.cell
        rows = -(-n // slabs)
        lattice = xp.arange(n, dtype=grid.dtype)
        for start in range(0, n, rows):
            slab = slice(start, min(start + rows, n))
            x = self.first[:, slab] * scale1
            x += self.second[:, slab] * scale2
            x[0] += lattice[slab, None, None]
            x[1] += lattice[None, :, None]
            x[2] += lattice[None, None, :]
            yield x


def displacement(grid: PeriodicCube, modes: Array) -> Displacement:
    """Computes displacements by second-order Lagrangian perturbation theory.

    phi_k = -delta_k / k^2;  Psi1 = -grad phi;  S = sum_{i<j} (phi,ii phi,jj - phi,ij^2);
    Psi2_k = i k S_k / k^2.

    Args:
        grid: the grid.
        modes: delta_k at D = 1; overwritten (with -phi_k), which saves the memory of one field.
    """

    def inverse_square(k: Array) -> Array:
        inverse = grid.xp.zeros_like(k)
        inverse[1:] = 1 / k[1:] ** 2
        return inverse

    over_k2 = grid.by_mode(inverse_square)
    modes *= over_k2
    first = _gradient(grid, modes)
    source = grid.to_modes(_second_order_source(grid, modes))
    source *= over_k2
    del over_k2
    return Displacement(grid, first, _gradient(grid, source))


def _gradient(grid: PeriodicCube, modes: Array) -> Array:
    """Computes the field of i k u_k, [3, N, N, N]."""
    out = grid.xp.empty((3, *(grid.width,) * 3), dtype=grid.dtype)
    for axis, k in enumerate(grid.derivatives):
        out[axis] = grid.to_field(modes * k * grid.xp.asarray(1j, dtype=modes.dtype))
    return out


def _second_order_source(grid: PeriodicCube, modes: Array) -> Array:
    """Computes S = sum_{i<j} (phi,ii phi,jj - phi,ij^2) with phi,ij = k_i k_j u_k.

    `modes` holds u_k = -phi_k. Even derivatives keep the Nyquist mode, mixed ones (odd in each
    axis) drop it.
    """
    even = [(n * grid.fundamental).astype(grid.dtype) ** 2 for n in grid.mode_numbers]
    trace = grid.to_field(modes * even[0])
    other = grid.to_field(modes * even[1])
    source = trace * other
    trace += other
    source += trace * grid.to_field(modes * even[2])
    del trace, other
    kx, ky, kz = grid.derivatives
    for ki, kj in ((kx, ky), (kx, kz), (ky, kz)):
        mixed = grid.to_field(modes * (ki * kj))
        mixed *= mixed
        source -= mixed
    return source
