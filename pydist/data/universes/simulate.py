"""Simulates one universe: parameters drawn from the seed, and particle counts per redshift."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import cast

import numpy as np
import numpy.typing as npt

from pydist.data.universes.cosmology import Cosmology, LinearPower, growth
from pydist.data.universes.deposit import deposit
from pydist.data.universes.fields import PeriodicCube, displacement, gaussian_modes, white_noise
from pydist.data.universes.options import OMEGA_B, PARAMETER_BOXES, UniverseOptions
from pydist.errors import UsageError


@dataclass(frozen=True)
class UniverseParameters:
    """Parameters that determine one universe.

    Attributes:
        index: number of the universe in its set.
        seed9: nine digits that name its initial phases, as in the public files.
        unit: the targets, each scaled to [-1, 1] over its range, float32 [4].
        physical: the same in physical units, float32 [4].
    """

    index: int
    seed9: int
    unit: npt.NDArray[np.float32]
    physical: npt.NDArray[np.float32]

    @property
    def cosmology(self) -> Cosmology:
        """Universe that has these parameters."""
        omega_m, sigma_8, n_s, h0 = (float(p) for p in self.physical)
        return Cosmology(omega_m, sigma_8, n_s, h0, OMEGA_B)


def draw_parameters(options: UniverseOptions, index: int) -> UniverseParameters:
    """Draws parameters of universe `index`: p = center + half width * unit, unit ~ U(-1, 1)^4."""
    sequence = _sequence(options, index, stream=0)
    generator = np.random.Generator(np.random.Philox(sequence))
    unit = generator.uniform(-1, 1, size=4).astype(np.float32)
    center, half = np.array(PARAMETER_BOXES[options.parameters]).T
    seed9 = 10**8 + int(sequence.generate_state(1, np.uint64)[0]) % (9 * 10**8)
    return UniverseParameters(index, seed9, unit, (center + half * unit).astype(np.float32))


def simulate(options: UniverseOptions, index: int) -> npt.NDArray[np.int16 | np.float32]:
    """Counts particles per voxel of universe `index` at each redshift, all from the same phases.

    Linear power spectrum, Gaussian field, second-order Lagrangian displacement, deposit; each
    channel sums to box^3 particles. Below about 10 Mpc/h the result clusters less than under
    gravity at z = 0, since particles cross and form no halos.

    Returns:
        [redshifts, box, box, box] on the host, of `options.dtype`.

    Raises:
        UsageError: a voxel holds more particles than int16 can count.
    """
    xp = choose_array_module(options.device)
    cosmology = draw_parameters(options, index).cosmology
    grid = PeriodicCube(options.box, options.box * options.cell, xp)
    generator = np.random.Generator(np.random.Philox(_sequence(options, index, stream=1)))
    power = LinearPower(cosmology, options.transfer)
    moved = displacement(grid, gaussian_modes(grid, white_noise(grid, generator), power))
    out = np.empty((len(options.redshifts), *(grid.width,) * 3), dtype=options.dtype)
    for channel, z in enumerate(options.redshifts):
        matter = cosmology.omega_m * (1 + z) ** 3
        omega_m_z = matter / (matter + 1 - cosmology.omega_m)
        positions = moved.positions(growth(z, cosmology.omega_m), omega_m_z)
        counts = deposit(positions, grid.width, xp, options.assignment)
        if options.dtype == "int16" and int(counts.max()) > np.iinfo(np.int16).max:
            raise UsageError(
                f"universe {index}: {int(counts.max())} particles in a voxel at z={z}, more than "
                'int16 counts; choose dtype="float32" or a larger cell'
            )
        out[channel] = counts if xp is np else xp.asnumpy(counts)
    return out


def choose_array_module(device: str) -> ModuleType:
    """Returns NumPy, or CuPy if `device` is "gpu", or "auto" with a GPU that CuPy can use.

    Raises:
        UsageError: "gpu" where CuPy or a GPU is missing.
    """
    if device == "cpu":
        return np
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() > 0:
            return cast(ModuleType, cupy)
        reason = "CuPy finds no GPU"
    except ImportError:
        reason = "CuPy is not installed (pip install cupy-cuda13x)"
    except Exception as error:
        reason = f"CuPy can't use a GPU: {error}"
    if device == "gpu":
        raise UsageError(f'device="gpu": {reason}; device="cpu" works everywhere')
    return np


def _sequence(options: UniverseOptions, index: int, stream: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([options.seed, index, stream])
