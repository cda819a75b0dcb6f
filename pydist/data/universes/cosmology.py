"""Computes power spectra and growth of structure in a flat universe with cold dark matter and Λ.

Units, here and in `fields`: wavenumbers k in h/Mpc, lengths in Mpc/h, powers in (Mpc/h)^3. Every
function of k accepts an array of any shape and returns one of the same shape; `k` may be a NumPy
or a CuPy array, and the array's own module does the computation.

Sources:
    Eisenstein & Hu 1998, ApJ 496, 605 (transfer functions; the numbers in brackets are theirs).
    Bardeen, Bond, Kaiser & Szalay 1986, ApJ 304, 15, with Sugiyama 1995, ApJS 100, 281 (BBKS).
    Heath 1977, MNRAS 179, 351 (growth).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, cast

import numpy as np

from pydist.errors import UsageError

Array = Any
"""A NumPy or a CuPy array."""

_POINTS = 2001
"""Points of an integration, an odd number."""


def array_module(array: Array) -> ModuleType:
    """Returns the module (NumPy or CuPy) whose functions work on `array`."""
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cast(ModuleType, cupy)
    return np


@dataclass(frozen=True)
class Cosmology:
    """A flat universe: the four parameters that CosmoFlow predicts, and two fixed ones.

    Attributes:
        omega_m: density of all matter, as a fraction of the critical one, today.
        sigma_8: rms of the linear density contrast in spheres of 8 Mpc/h, today.
        n_s: slope of the primordial power spectrum.
        h0: Hubble constant, km/s/Mpc.
        omega_b: density of baryons.
        t_cmb: temperature of the microwave background, K.
    """

    omega_m: float = 0.3089
    sigma_8: float = 0.8159
    n_s: float = 0.9667
    h0: float = 67.74
    omega_b: float = 0.0486
    t_cmb: float = 2.7255

    def __post_init__(self) -> None:
        if not (0 < self.omega_b < self.omega_m <= 1 and self.h0 > 0 and self.sigma_8 > 0):
            raise UsageError(
                f"omega_m={self.omega_m}, omega_b={self.omega_b}, h0={self.h0}, "
                f"sigma_8={self.sigma_8}: 0 < omega_b < omega_m <= 1, h0 > 0 and sigma_8 > 0 hold "
                "in a flat universe"
            )

    @property
    def h(self) -> float:
        """Hubble constant h, which is measured in units of 100 km/s/Mpc."""
        return self.h0 / 100

    @property
    def matter(self) -> float:
        """Physical matter density, which is omega_m h^2."""
        return self.omega_m * self.h**2

    @property
    def baryons(self) -> float:
        """Physical baryon density, which is omega_b h^2."""
        return self.omega_b * self.h**2

    @property
    def baryon_fraction(self) -> float:
        """Fraction of all matter that is baryons."""
        return self.omega_b / self.omega_m

    @property
    def theta(self) -> float:
        """Temperature that the microwave background has, in units of 2.7 K."""
        return self.t_cmb / 2.7


def sound_horizon_fit(c: Cosmology) -> float:
    """Computes the sound horizon at the drag epoch, Mpc, to 2 %. Source: E&H 1998, (26)."""
    return 44.5 * math.log(9.83 / c.matter) / math.sqrt(1 + 10 * c.baryons**0.75)


def transfer_no_wiggle(k: Array, c: Cosmology) -> Array:
    """Computes T(k) without acoustic oscillations. Source: Eisenstein & Hu 1998, (28)-(31)."""
    xp = array_module(k)
    f = c.baryon_fraction
    alpha = 1 - 0.328 * math.log(431 * c.matter) * f + 0.38 * math.log(22.3 * c.matter) * f**2
    shape = alpha + (1 - alpha) / (1 + (0.43 * k * c.h * sound_horizon_fit(c)) ** 4)
    q = k * c.theta**2 / (c.omega_m * c.h * shape)
    log_term = xp.log(2 * math.e + 1.8 * q)
    return log_term / (log_term + (14.2 + 731 / (1 + 62.5 * q)) * q**2)


def transfer_bbks(k: Array, c: Cosmology) -> Array:
    """Computes T(k) of BBKS (G3), with Sugiyama's (1995) correction of the shape for baryons.

    k = 0 gives 1, the limit.
    """
    xp = array_module(k)
    shape = c.omega_m * c.h * math.exp(-c.omega_b * (1 + math.sqrt(2 * c.h) / c.omega_m))
    q = xp.maximum(k, 1e-30) / shape
    series = 1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    return xp.log1p(2.34 * q) / (2.34 * q) * series**-0.25


class AcousticScales:
    """Scales on which the full transfer function of Eisenstein & Hu depends, besides k.

    Attributes:
        cosmology: the universe.
        k_eq: scale of the particle horizon at equality, 1/Mpc (3).
        z_drag: redshift at which the baryons are released from the photons (4).
        sound_horizon: comoving distance that sound has traveled by then, Mpc (6).
        k_silk: scale of Silk damping, 1/Mpc (7).
        alpha_c: suppression of cold matter (11).
        beta_c: its shift in the logarithm (12).
        alpha_b: amplitude of the oscillations (14).
        beta_b: their envelope (24).
        beta_node: shift of their nodes (23).
    """

    def __init__(self, cosmology: Cosmology) -> None:
        self.cosmology = c = cosmology
        om, ob, f, theta = c.matter, c.baryons, c.baryon_fraction, c.theta
        z_eq = 2.5e4 * om / theta**4  # (2); the paper's z_eq is 1 + z
        self.k_eq = k_eq = 0.0746 * om / theta**2
        b1 = 0.313 * om**-0.419 * (1 + 0.607 * om**0.674)
        b2 = 0.238 * om**0.223
        self.z_drag = z_drag = 1291 * om**0.251 / (1 + 0.659 * om**0.828) * (1 + b1 * ob**b2)
        # R (5): momentum density of baryons over that of photons, at drag and at equality.
        r_drag = 31.5 * ob / theta**4 * 1000 / (1 + z_drag)
        r_eq = 31.5 * ob / theta**4 * 1000 / z_eq
        growth = (math.sqrt(1 + r_drag) + math.sqrt(r_drag + r_eq)) / (1 + math.sqrt(r_eq))
        self.sound_horizon = horizon = 2 / (3 * k_eq) * math.sqrt(6 / r_eq) * math.log(growth)
        a1 = (46.9 * om) ** 0.670 * (1 + (32.1 * om) ** -0.532)
        a2 = (12.0 * om) ** 0.424 * (1 + (45.0 * om) ** -0.582)
        c1 = 0.944 / (1 + (458 * om) ** -0.708)
        c2 = (0.395 * om) ** -0.0266
        y = z_eq / (1 + z_drag)
        root = math.sqrt(1 + y)
        suppression = y * (-6 * root + (2 + 3 * y) * math.log((root + 1) / (root - 1)))  # (15)
        self.k_silk = 1.6 * ob**0.52 * om**0.73 * (1 + (10.4 * om) ** -0.95)
        self.alpha_c = a1**-f * a2 ** -(f**3)
        self.beta_c = 1 / (1 + c1 * ((1 - f) ** c2 - 1))
        self.alpha_b = 2.07 * k_eq * horizon * (1 + r_drag) ** -0.75 * suppression
        self.beta_b = 0.5 + f + (3 - 2 * f) * math.sqrt((17.2 * om) ** 2 + 1)
        self.beta_node = 8.41 * om**0.435

    def transfer(self, k: Array) -> Array:
        """Computes T(k), k in h/Mpc. Source: Eisenstein & Hu 1998, (16)-(24)."""
        xp = array_module(k)
        f = self.cosmology.baryon_fraction
        k = xp.maximum(k, 1e-30) * self.cosmology.h  # in 1/Mpc; k = 0 gives 1, the limit
        q = k / (13.41 * self.k_eq)
        x = k * self.sound_horizon

        def shape(alpha: float, beta: float) -> Array:
            log_term = xp.log(math.e + 1.8 * beta * q)
            return log_term / (log_term + (14.2 / alpha + 386 / (1 + 69.9 * q**1.08)) * q**2)

        early = 1 / (1 + (x / 5.4) ** 4)
        cold = early * shape(1, self.beta_c) + (1 - early) * shape(self.alpha_c, self.beta_c)
        shifted = x / xp.cbrt(1 + (self.beta_node / x) ** 3)
        damped = self.alpha_b / (1 + (self.beta_b / x) ** 3) * xp.exp(-((k / self.k_silk) ** 1.4))
        sound = xp.sinc(shifted / math.pi) * (shape(1, 1) / (1 + (x / 5.2) ** 2) + damped)
        return f * sound + (1 - f) * cold


def transfer_full(k: Array, c: Cosmology) -> Array:
    """Computes T(k) with acoustic oscillations. Source: Eisenstein & Hu 1998, (16)-(24)."""
    return AcousticScales(c).transfer(k)


TRANSFER: dict[str, Callable[[Array, Cosmology], Array]] = {
    "no-wiggle": transfer_no_wiggle,
    "full": transfer_full,
    "bbks": transfer_bbks,
}


def top_hat(x: Array) -> Array:
    """Computes the Fourier transform of a ball of radius R at x = k R; it is 1 at x = 0."""
    xp = array_module(x)
    # Below 0.02 the closed form loses its digits to cancellation; the series is exact to 1e-12.
    safe = xp.maximum(x, 0.02)
    closed = 3 * (xp.sin(safe) - safe * xp.cos(safe)) / safe**3
    return xp.where(x < 0.02, 1 - x**2 / 10 + x**4 / 280, closed)


class LinearPower:
    """Linear power spectrum at z = 0 that `sigma_8` normalizes: P(k) = A k^n_s T(k)^2.

    Args:
        cosmology: the universe.
        transfer: "no-wiggle" and "full" of Eisenstein & Hu, or "bbks".

    Raises:
        UsageError: no such transfer function.
    """

    def __init__(self, cosmology: Cosmology, transfer: str = "no-wiggle") -> None:
        if transfer not in TRANSFER:
            raise UsageError(f"transfer={transfer!r}; possible are {', '.join(TRANSFER)}")
        self.cosmology = cosmology
        self._transfer = TRANSFER[transfer]

    def __call__(self, k: Array) -> Array:
        """Computes P at the wavenumbers `k` (h/Mpc), in (Mpc/h)^3."""
        return self.amplitude * self._shape(k)

    @cached_property
    def amplitude(self) -> float:
        """Amplitude A, in (Mpc/h)^(3 + n_s), that gives the universe its `sigma_8`."""
        return (self.cosmology.sigma_8 / _sigma(self._shape, 8.0)) ** 2

    def _shape(self, k: Array) -> Array:
        return k**self.cosmology.n_s * self._transfer(k, self.cosmology) ** 2


def _sigma(power: Callable[[Array], Array], radius: float) -> float:
    """Computes sigma_R: sigma_R^2 = int dln k  k^3 P / (2 pi^2) W^2(kR); 501 points give 1e-7."""
    log_k = np.linspace(math.log(1e-5), math.log(1e2), _POINTS)
    k = np.exp(log_k)
    integrand = k**3 * power(k) / (2 * math.pi**2) * top_hat(k * radius) ** 2
    step = log_k[1] - log_k[0]
    return math.sqrt(step * float(integrand.sum() - (integrand[0] + integrand[-1]) / 2))


def growth(z: float, omega_m: float) -> float:
    """Computes the linear growth D(z) / D(0) of a flat universe.

    D(a) ~ E(a) int_0^a da' / (a' E(a'))^3 with E^2 = omega_m a^-3 + 1 - omega_m (Heath 1977).

    Args:
        z: redshift.
        omega_m: matter density today, as a fraction of the critical one.
    """
    return _growth_unscaled(1 / (1 + z), omega_m) / _growth_unscaled(1, omega_m)


def _growth_unscaled(a: float, omega_m: float) -> float:
    # With u = sqrt(a') the integrand, 2 u^4 / (omega_m + (1 - omega_m) u^6)^1.5, is smooth at 0.
    u = np.linspace(0, math.sqrt(a), _POINTS)
    integrand = 2 * u**4 / (omega_m + (1 - omega_m) * u**6) ** 1.5
    weights = np.ones(_POINTS)
    weights[1:-1:2], weights[2:-1:2] = 4, 2  # Simpson's rule
    integral = float(weights @ integrand) * math.sqrt(a) / (_POINTS - 1) / 3
    return math.sqrt(omega_m / a**3 + 1 - omega_m) * integral
