"""The gradient noise scale: the batch from which on a larger one saves few steps."""

from __future__ import annotations

import math
from typing import Any


class NoiseScale:
    """Running estimate that tracks the gradient noise scale B = tr(Σ) / |G|².

    G is the gradient of the whole data set, and Σ the covariance of the gradients of single
    samples. A step's batch of N samples in P parts gives unbiased estimates of both: with part i of
    n_i samples and gradient g_i, and the batch's gradient g::

        m = sum(n_i / N |g_i|²)
        tr(Σ) = N (m - |g|²) / (P - 1)
        |G|² = |g|² - tr(Σ) / N

    Their quotient is biased, so each is averaged over steps first, with exponential weights.

    Source: McCandlish, Kaplan, Amodei, An empirical model of large-batch training (arXiv
    1812.06162), appendix A.1, for parts of unequal size.

    Args:
        smoothing: weight of the average so far, in [0, 1).
    """

    def __init__(self, smoothing: float = 0.9) -> None:
        self.smoothing = smoothing
        self.measurements = 0
        """Number of measurements so far."""
        self._noise = self._signal = self._weight = 0.0

    def add(self, parts: float, whole: float, count: int, samples: int) -> bool:
        """Adds the measurement of a step.

        Args:
            parts: m, the mean of the squared norms of the parts' gradients.
            whole: |g|², of the batch.
            count: P, number of parts with samples.
            samples: N.

        Returns:
            Whether it was added: not with one part, or where a gradient has overflowed.
        """
        if count < 2 or not (math.isfinite(parts) and math.isfinite(whole)):
            return False
        noise = samples * (parts - whole) / (count - 1)
        kept, new = self.smoothing, 1 - self.smoothing
        self._noise = kept * self._noise + new * noise
        self._signal = kept * self._signal + new * (whole - noise / samples)
        self._weight = kept * self._weight + new
        self.measurements += 1
        return True

    @property
    def noise(self) -> float:
        """Estimate of tr(Σ), which is NaN before the first measurement."""
        return self._noise / self._weight if self._weight else math.nan

    @property
    def signal(self) -> float:
        """Estimate of |G|², which is below 0 where noise hides it.

        It is NaN before the first measurement.
        """
        return self._signal / self._weight if self._weight else math.nan

    @property
    def value(self) -> float:
        """Estimate of B in samples, which is infinity where noise hides the gradient.

        It is NaN before the first measurement.
        """
        if not self._weight:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages, as plain numbers."""
        return {
            "noise": self._noise, "signal": self._signal, "weight": self._weight,
            "measurements": self.measurements,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the averages of `state_dict`."""
        self._noise, self._signal = float(state["noise"]), float(state["signal"])
        self._weight, self.measurements = float(state["weight"]), int(state["measurements"])
