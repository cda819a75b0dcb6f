"""Tests of random fields and displacements against analytic solutions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pydist.data.universes.cosmology import Cosmology, LinearPower, growth, top_hat
from pydist.data.universes.deposit import deposit
from pydist.data.universes.fields import PeriodicCube, displacement, gaussian_modes, white_noise
from pydist.data.universes.spectra import power_spectrum
from pydist.errors import UsageError

POWER = LinearPower(Cosmology())


def coordinates(grid: PeriodicCube) -> list[np.ndarray]:
    return np.meshgrid(*[np.arange(grid.width) * grid.cell] * 3, indexing="ij")


def random_modes(grid: PeriodicCube, seed: int) -> np.ndarray:
    return gaussian_modes(grid, white_noise(grid, np.random.default_rng(seed)), POWER)


def test_spectrum_of_fields_is_the_one_asked_for() -> None:
    grid, count = PeriodicCube(32, 256.0), 40
    spectra = [
        power_spectrum(grid, grid.to_field(random_modes(grid, seed))) for seed in range(count)
    ]
    exact = PeriodicCube(32, 256.0, dtype="float64")  # each mode has the power asked for
    modes = exact.by_mode(lambda k: np.sqrt(POWER(k) * 32**6 / exact.volume))
    expected = power_spectrum(exact, exact.to_field(modes)).power
    ratio = np.mean([s.power for s in spectra], axis=0) / expected
    deviation = np.sqrt(2 / spectra[0].modes / count)
    assert np.all(abs(ratio - 1)[:-1] < 4 * deviation[:-1])
    assert abs(((ratio - 1) / deviation)[:-1]).mean() < 1.5


def test_variance_of_a_field_is_the_sum_of_its_power() -> None:
    grid = PeriodicCube(64, 512.0, dtype="float64")
    found = [grid.to_field(random_modes(grid, seed)).var() for seed in range(4)]
    nx, ny, nz = (np.fft.fftfreq(64, 1 / 64)[i] for i in np.ogrid[:64, :64, :64])
    k = grid.fundamental * np.sqrt(nx**2 + ny**2 + nz**2).ravel()[1:]
    assert np.mean(found) == pytest.approx(POWER(k).sum() / grid.volume, rel=0.02)


def test_rms_in_spheres_of_8_is_sigma_8() -> None:
    grid = PeriodicCube(128, 512.0)
    in_spheres = grid.by_mode(lambda k: top_hat(8 * k))
    found = [grid.to_field(random_modes(grid, seed) * in_spheres).std() for seed in (0, 1)]
    assert np.mean(found) == pytest.approx(POWER.cosmology.sigma_8, rel=0.01)


def test_mean_of_a_field_is_zero_and_its_modes_are_reproducible() -> None:
    grid = PeriodicCube(16, 64.0)
    modes = random_modes(grid, 5)
    assert modes.dtype == np.complex64
    assert modes[0, 0, 0] == 0
    np.testing.assert_array_equal(modes, random_modes(grid, 5))
    assert not np.array_equal(modes, random_modes(grid, 6))


def test_plane_wave_moves_along_itself_only() -> None:
    grid = PeriodicCube(32, 100.0, dtype="float64")
    k, amplitude = 3 * grid.fundamental, 0.7
    x = coordinates(grid)[0]
    moved = displacement(grid, grid.to_modes(amplitude * np.cos(k * x)))
    np.testing.assert_allclose(moved.first[0], -amplitude / k * np.sin(k * x), atol=1e-13)
    np.testing.assert_allclose(moved.first[1:], 0, atol=1e-13)
    np.testing.assert_allclose(moved.second, 0, atol=1e-13)


def test_two_crossed_waves_have_the_analytic_second_order() -> None:
    grid = PeriodicCube(24, 80.0, dtype="float64")
    k, amplitude = 2 * grid.fundamental, 0.5
    x, y, _ = coordinates(grid)
    moved = displacement(grid, grid.to_modes(amplitude * (np.cos(k * x) + np.cos(k * y))))
    scale = amplitude**2 / (2 * k)
    np.testing.assert_allclose(moved.second[0], -scale * np.sin(k * x) * np.cos(k * y), atol=1e-13)
    np.testing.assert_allclose(moved.second[1], -scale * np.cos(k * x) * np.sin(k * y), atol=1e-13)
    np.testing.assert_allclose(moved.second[2], 0, atol=1e-13)


@pytest.mark.parametrize("width", [16, 15])
def test_divergence_of_the_displacement_is_minus_the_density(width: int) -> None:
    grid = PeriodicCube(width, 60.0, dtype="float64")
    modes = random_modes(grid, 1)
    for axis in range(3):  # the Nyquist planes have no derivative on the grid
        index = [slice(None)] * 3
        index[axis] = width // 2 if width % 2 == 0 else slice(0, 0)
        modes[tuple(index)] = 0
    density = grid.to_field(modes)
    first = displacement(grid, modes.copy()).first
    divergence = sum(
        grid.to_field(1j * k * grid.to_modes(first[axis]))
        for axis, k in enumerate(grid.derivatives)
    )
    np.testing.assert_allclose(divergence, -density, atol=1e-13 * abs(density).max())


def test_rms_displacement_is_the_integral_of_the_power() -> None:
    grid = PeriodicCube(64, 512.0)
    found = [displacement(grid, random_modes(grid, seed)).first[0].std() for seed in range(6)]
    nx, ny, nz = (np.fft.fftfreq(64, 1 / 64)[i] for i in np.ogrid[:64, :64, :64])
    k = grid.fundamental * np.sqrt(nx**2 + ny**2 + nz**2).ravel()[1:]
    expected = math.sqrt((POWER(k) / (3 * k**2)).sum() / grid.volume)
    assert np.mean(found) == pytest.approx(expected, rel=0.1)


def test_positions_follow_first_and_second_order_growth() -> None:
    grid = PeriodicCube(8, 40.0, dtype="float64")
    moved = displacement(grid, random_modes(grid, 2))
    whole = np.concatenate(list(moved.positions(0.5, 0.8, slabs=3)), axis=1)
    factor = 3 / 7 * 0.25 * 0.8 ** (-1 / 143)
    lattice = np.stack(np.meshgrid(*[np.arange(8.0)] * 3, indexing="ij"))
    expected = lattice + (0.5 * moved.first + factor * moved.second) / grid.cell
    np.testing.assert_allclose(whole, expected, atol=1e-12)


def test_particles_follow_the_linear_power_on_large_scales() -> None:
    grid = PeriodicCube(96, 384.0)
    modes = random_modes(grid, 3)
    linear = power_spectrum(grid, grid.to_field(modes))
    d = growth(3, POWER.cosmology.omega_m)
    moved = displacement(grid, modes)
    density = deposit(moved.positions(d, 0.97), grid.width, np, "cic")
    of_cells = math.prod(np.sinc(n / grid.width) ** 2 for n in grid.mode_numbers)
    field = grid.to_field(grid.to_modes(density - 1) / of_cells)
    found = power_spectrum(grid, field)
    large = linear.k < 0.1
    ratio = (found.power / (d**2 * linear.power))[large]
    np.testing.assert_allclose(ratio, 1, atol=0.06)
    assert ratio.mean() == pytest.approx(0.995, abs=0.015)


def test_grid_refuses_what_it_can_not_be() -> None:
    with pytest.raises(UsageError, match="at least 2 cells"):
        PeriodicCube(1, 10.0)
    with pytest.raises(UsageError, match="float16"):
        PeriodicCube(8, 10.0, dtype="float16")
