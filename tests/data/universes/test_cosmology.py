"""Tests of linear theory against published test vectors and exact properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import simpson

from pydist.data.universes.cosmology import (
    TRANSFER,
    AcousticScales,
    Cosmology,
    LinearPower,
    growth,
    sound_horizon_fit,
    top_hat,
)
from pydist.errors import UsageError

PLANCK = Cosmology(omega_m=0.3089, omega_b=0.0486, h0=67.74, n_s=0.9667, sigma_8=0.8159)
K = np.array([0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 3])
EXPECTED = {
    "no-wiggle": [0.99202, 0.78552, 0.58498, 0.27804, 0.13317, 0.05459, 0.01408, 0.00465, 0.00073],
    "full": [0.99221, 0.77957, 0.58234, 0.27087, 0.13092, 0.05498, 0.01408, 0.00468, 0.00074],
    "bbks": [0.98502, 0.76488, 0.56416, 0.28929, 0.13948, 0.05669, 0.01449, 0.00474, 0.00073],
}


@pytest.mark.parametrize("name", TRANSFER)
def test_transfer_functions_give_the_published_values(name: str) -> None:
    np.testing.assert_allclose(TRANSFER[name](K, PLANCK), EXPECTED[name], atol=5.1e-6)


@pytest.mark.parametrize("name", TRANSFER)
def test_transfer_function_is_one_for_long_waves_and_falls(name: str) -> None:
    k = np.concatenate([[0.0], np.geomspace(1e-6, 10, 300)])
    values = TRANSFER[name](k, PLANCK)
    assert values[0] == pytest.approx(1, abs=1e-9)
    assert values[1] == pytest.approx(1, abs=1e-3)
    assert np.all(np.diff(values[k < 0.01]) < 0)
    assert np.all((values > 0) & (values <= 1))


def test_acoustic_scales() -> None:
    scales = AcousticScales(PLANCK)
    assert sound_horizon_fit(PLANCK) == pytest.approx(150.21, abs=5e-3)
    assert scales.sound_horizon == pytest.approx(151.23, abs=5e-3)
    assert scales.z_drag == pytest.approx(1020.5, abs=0.05)
    assert scales.k_silk == pytest.approx(0.0900, abs=5e-5)


def test_full_transfer_function_wiggles_around_the_smooth_one() -> None:
    k = np.linspace(0.05, 0.3, 500)
    ratio = TRANSFER["full"](k, PLANCK) / TRANSFER["no-wiggle"](k, PLANCK)
    turns = np.flatnonzero(np.diff(np.sign(np.diff(ratio))))
    # Peaks of sin(ks) are 2 pi / s apart; a peak and the next trough, half of that.
    spacing = np.pi / (AcousticScales(PLANCK).sound_horizon * PLANCK.h)
    assert np.diff(k[turns]).mean() == pytest.approx(spacing, rel=0.1)


def sigma(power: LinearPower, radius: float) -> float:
    """Computes the rms in spheres by SciPy: sigma^2 = int dln k k^3 P(k) W(kR)^2 / (2 pi^2)."""
    log_k = np.linspace(math.log(1e-5), math.log(1e2), 4001)
    k = np.exp(log_k)
    terms = k**3 * power(k) * top_hat(k * radius) ** 2 / (2 * math.pi**2)
    return math.sqrt(simpson(terms, x=log_k))


def test_power_spectrum_is_normalised_to_sigma_8() -> None:
    power = LinearPower(PLANCK)
    np.testing.assert_allclose(power(np.array([0.02, 0.1, 1])), [23742, 5831, 65.8], rtol=1e-4)
    assert sigma(power, 8) == pytest.approx(0.8159, rel=1e-6)
    assert sigma(power, 1) == pytest.approx(2.4255, abs=5e-5)
    k = np.geomspace(1e-3, 1, 5000)
    assert k[np.argmax(power(k))] == pytest.approx(0.0162, abs=5e-5)


def growth_fit(z: float, omega_m: float) -> float:
    """Computes D(z) / D(0) to 0.2 %. Source: Carroll, Press & Turner 1992, ARA&A 30, 499, (29)."""

    def unscaled(a: float) -> float:
        e2 = omega_m / a**3 + 1 - omega_m
        om, ol = omega_m / a**3 / e2, (1 - omega_m) / e2
        return a * om / (om ** (4 / 7) - ol + (1 + om / 2) * (1 + ol / 70))

    return unscaled(1 / (1 + z)) / unscaled(1)


@pytest.mark.parametrize(
    ("omega_m", "expected"),
    [
        (0.3, [0.77318, 0.61181, 0.50045, 0.31884]),
        (0.3089, [0.77063, 0.60877, 0.49757, 0.31677]),
        (1.0, [1 / 1.5, 1 / 2, 1 / 2.5, 1 / 4]),
    ],
)
def test_growth(omega_m: float, expected: list[float]) -> None:
    found = [growth(z, omega_m) for z in (0.5, 1, 1.5, 3)]
    np.testing.assert_allclose(found, expected, atol=5.1e-6)
    fit = [growth_fit(z, omega_m) for z in (0.5, 1, 1.5, 3)]
    np.testing.assert_allclose(fit, found, rtol=3e-3)


def test_growth_is_exact_in_a_universe_of_matter_alone() -> None:
    assert growth(3, 1.0) == pytest.approx(0.25, rel=1e-12)
    # D = a early on, so D(1) relative to a universe of matter alone.
    assert 1 / (1001 * growth(1000, 0.3)) == pytest.approx(0.77898, abs=5e-6)


@given(z=st.floats(0, 20), omega_m=st.floats(0.06, 1))
def test_growth_is_slower_the_less_matter_there_is(z: float, omega_m: float) -> None:
    assert 1 / (1 + z) - 1e-9 <= growth(z, omega_m) <= 1


def test_top_hat_is_the_transform_of_a_ball() -> None:
    x = np.concatenate([np.linspace(0, 0.05, 201), np.linspace(0.1, 30, 50)])
    # Gauss quadrature of sin(x r) / (x r) over a ball has no cancellation.
    r, weight = np.polynomial.legendre.leggauss(60)
    r, weight = (r + 1) / 2, weight / 2
    expected = (3 * weight * r**2 * np.sinc(np.outer(x, r) / np.pi)).sum(1)
    np.testing.assert_allclose(top_hat(x), expected, atol=1e-12)


def test_impossible_universe_is_refused() -> None:
    with pytest.raises(UsageError, match=r"omega_b=0\.5"):
        Cosmology(omega_m=0.3, omega_b=0.5)
    with pytest.raises(UsageError, match="no-wiggle, full, bbks"):
        LinearPower(PLANCK, "camb")
