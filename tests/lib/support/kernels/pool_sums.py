"""Calls the native sums over pooling windows, and defines the expected results, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pydist import _native as native

TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}
ORIGIN = (0, 0, 0)

Scales = Sequence[np.ndarray]
"""Scales of the outputs along each dim."""


def footprints(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[native.Footprint]:
    return [
        native.Footprint(k, s, 1, p, p) for k, s, p in zip(kernel, stride, padding, strict=True)
    ]


@dataclass(frozen=True)
class Pooling:
    """Pooling windows that are summed, with the positions of both arrays in global coordinates."""

    source_lo: tuple[int, int, int]
    out_lo: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]

    @property
    def footprints(self) -> list[native.Footprint]:
        return footprints(self.kernel, self.stride, self.padding)

    def forward(self, source: Any, out: Any, scales: Any, accumulate: bool) -> None:
        native.pool_sum_forward(
            source, out, self.source_lo, self.out_lo, self.footprints, scales, accumulate
        )

    def backward(self, grad: Any, source_grad: Any, scales: Any, accumulate: bool) -> None:
        native.pool_sum_backward(
            grad, source_grad, self.out_lo, self.source_lo, self.footprints, scales, accumulate
        )

    def matrices(
        self, sources: Sequence[int], outs: Sequence[int], scales: Scales
    ) -> list[np.ndarray]:
        """Returns the definition: a matrix [outs, sources] of scaled memberships for each dim."""
        result = []
        for dim in range(3):
            o = np.arange(outs[dim])[:, None]
            i = np.arange(sources[dim])[None, :]
            start = (o + self.out_lo[dim]) * self.stride[dim] - self.padding[dim]
            tap = i + self.source_lo[dim] - start
            inside = (tap >= 0) & (tap < self.kernel[dim])
            result.append(inside * np.asarray(scales[dim])[:, None])
        return result


def in_float64(tensor: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.double().numpy())


def assert_near(actual: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(in_float64(actual), expected, rtol=0, atol=TOLERANCE[dtype] * scale)
