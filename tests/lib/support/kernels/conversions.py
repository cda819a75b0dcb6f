"""Stored blocks and maps for the kernels that convert them to inputs, on CPU and GPU."""

from __future__ import annotations

import numpy as np

SMALL = ["uint8", "int8", "int16"]
"""Types with a lookup table of all values."""

WIDE = ["int32", "int64", "float16", "float32", "float64"]

INPUTS = ["float32", "float64"]

IDENTITY = np.array([[-np.inf, np.inf, 0.0, 1.0]])

MAPS = np.array([[-np.inf, np.inf, 0.3, 1.7], [2.5, 9.5, 0.0, 1.0], [0.0, 50.0, -4.0, 0.1]])
"""Maps of three channels: lower, upper, shift and scale."""


def block(dtype: str, shape: tuple[int, ...] = (3, 5, 6, 70), seed: int = 0) -> np.ndarray:
    """Returns numbers of [0, 120), as multiples of 1/8 for floating-point types."""
    numbers = np.random.default_rng(seed).integers(0, 120, shape)
    return (numbers / (8 if dtype.startswith("float") else 1)).astype(dtype)


def table(stored: np.ndarray, out_dtype: str) -> np.ndarray:
    """Returns a random lookup table of three channels."""
    entries = 1 << 8 * stored.itemsize
    return np.random.default_rng(1).standard_normal((3, entries)).astype(out_dtype)


def flag() -> np.ndarray:
    """Returns a flag that the kernels set for values that are not finite."""
    return np.zeros(1, np.int32)
