"""Computes statistics of every row of a shard in one pass over memory, and merges parts.

A row is a set of values with its own mean and variance, or a part of one: a channel, or a channel
of one sample. Its statistics are its count n, mean m and M2 = Σ (x - m)². Statistics of parts merge
without cancellation: n = Σ n_i, m = Σ n_i m_i / n, M2 = Σ M2_i + Σ n_i (m_i - m)².

Source: Chan, Golub, LeVeque (1983), "Algorithms for computing the sample variance".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pydist._loader import native

# Elements of a part that is summed separately: enough to keep a block of threads busy.
PART = 1 << 14
# More parts than a device can run concurrently only cost their merging.
MOST_PARTS = 512


class Moments(NamedTuple):
    """The statistics of R rows or their parts, in fp64; merged ones are one tensor [3, R].

    Attributes:
        n: values per row, [..., 1] or [..., R].
        mean: [..., R].
        m2: sum of squared deviations from the mean, [..., R].
    """

    n: Tensor
    mean: Tensor
    m2: Tensor


@dataclass(frozen=True)
class Transform:
    """Map y = act((x - mean) factor + offset) that is applied to every row.

    Attributes:
        values: mean, factor and offset, [3, R], in the dtype for statistics. Or [4, R]: the last
            row holds the slopes of act for negative values, as of PReLU.
        negative_slope: the factor of act for negative values: 1 for no activation, 0 for ReLU.
    """

    values: Tensor
    negative_slope: float = 1.0


@dataclass(frozen=True)
class Rows:
    """Computes a norm's coefficients from its statistics, and from the sums of backward.

    Attributes:
        moments: float64 [3, G], from `merged`. With R rows, R / G consecutive rows share moments.
        scale: [C] or `None`, of any type. Row r belongs to channel r modulo C.
        eps: added to the variance.
        centered: whether the mean is subtracted; if not, the mean of squares is the variance.
    """

    moments: Tensor
    scale: Tensor | None
    eps: float
    centered: bool = True

    def values(self, shift: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
        """Returns the values [4, R] of the transform (x - mean) factor + shift, without slopes.

        Far from zero, the offset compensates the rounding of the mean.

        Args:
            shift: [C] or `None`.
            rows: R.
            dtype: of x.
        """
        values = torch.empty(4, rows, dtype=statistics_dtype(dtype), device=self.moments.device)
        shift = None if shift is None else _as_read(shift, values)
        native.norm_values(
            self.moments, self._scale_for(values), shift, self.eps, self.centered, values
        )
        return values

    def totals(self, values: Tensor, sums: Tensor, affine: Tensor | None) -> Tensor:
        """Returns the sums that backward adds over ranks, [2, G]: Σ scale g, Σ scale g (x - mean).

        Args:
            values: from `values`.
            sums: from `gradient_sums`, [2, R].
            affine: receives dL/dshift and dL/dscale, float64 [2, C]; `None` if not needed.
        """
        totals = sums.new_empty(2, self.moments.shape[1])
        scale = self._scale_for(values)
        native.norm_totals(
            self.moments, scale, self.eps, self.centered, values, sums, totals, affine
        )
        return totals

    def coefficients(self, values: Tensor, totals: Tensor) -> Tensor:
        """Returns the coefficients of `combine`, from the totals of all ranks."""
        found = values.new_empty(3, values.shape[1])
        scale = self._scale_for(values)
        native.norm_coefficients(
            self.moments, scale, self.eps, self.centered, values, totals, found
        )
        return found

    def _scale_for(self, values: Tensor) -> Tensor | None:
        return None if self.scale is None else _as_read(self.scale, values)


def set_slopes(values: Tensor, slopes: Tensor) -> None:
    """Sets the slopes, [1] or [C] as in `Rows`, among the values [4, R] of a transform."""
    native.norm_slopes(_as_read(slopes, values), values)


def _as_read(numbers: Tensor, values: Tensor) -> Tensor:
    """Returns per-channel numbers as the kernels need them: of the values' type, contiguous."""
    return numbers.detach().to(values.dtype).contiguous()


def unbiased(statistics: Moments) -> Tensor:
    """Returns the unbiased variance."""
    return statistics.m2 / (statistics.n - 1).clamp(min=1)


def merged(parts: Moments) -> Tensor:
    """Returns the moments [3, R] of the union of parts [parts, R]; a part may be empty.

    The result depends only on the parts and their order, not on the rank that merges.
    """
    found = parts.mean.new_empty(3, parts.mean.shape[1])
    native.norm_merge_parts(parts.n, parts.mean, parts.m2, found)
    return found


def moments(x: Tensor, per_sample: bool = False) -> Tensor:
    """Computes means and squared deviations [2, R] of the rows of a dense x [N, C, ...].

    x may be empty, and is read from memory once. The sums of some thousand deviations from a nearby
    mean are formed in fp32 (fp64 for fp64), and merged in fp64. Where torch sums a channels-last
    tensor channel by channel in fp32, variances of a million values are off by 1e-3, here by 1e-8.

    Args:
        x: the values.
        per_sample: whether the rows are channels of each sample, [N C], or channels, [C].
    """
    sums = _sums(x, per_sample)
    native.norm_moments(x, sums)
    return sums[0]


def apply(out: Tensor, x: Tensor, transform: Transform) -> None:
    """Writes act((x - mean) factor + offset) into `out`; x is read once.

    Args:
        out: of the shape and strides of x.
        x: dense, [N, C, ...], may be empty.
        transform: of rows that are channels, or channels of each sample.
    """
    native.norm_apply(x, out, transform.values, transform.negative_slope)


def gradient_sums(grad: Tensor, x: Tensor, transform: Transform) -> Tensor:
    """Computes Σ g and Σ g (x - mean) of every row, [2, R] in fp64; x and dy are read once.

    g is dy times the derivative of the activation. The mean is the rounded mean of the transform.
    If the transform has slopes, a third sum is dL/d slope.

    Args:
        grad: dL/dy, of the shape and strides of x.
        x: dense, [N, C, ...], may be empty.
        transform: the map from x to y.
    """
    per_sample = transform.values.shape[1] != x.shape[1]
    sums = _sums(x, per_sample, len(transform.values) - 1)
    native.norm_grad_sums(grad, x, transform.values, sums, transform.negative_slope)
    return sums[0]


def combine(
    out: Tensor, grad: Tensor, x: Tensor, transform: Transform, coefficients: Tensor
) -> None:
    """Writes a g + b (x - mean) + d into `out`, with g and mean as in `gradient_sums`.

    Args:
        out: of the shape and strides of x.
        grad: dL/dy, of the shape and strides of x.
        x: dense, [N, C, ...], may be empty.
        transform: the map from x to y.
        coefficients: a, b and d, [3, R], in the dtype of the transform.
    """
    native.norm_grad_input(grad, x, out, transform.values, coefficients, transform.negative_slope)


def _sums(x: Tensor, per_sample: bool, count: int = 2) -> Tensor:
    """Allocates memory [parts, count, R] for sums, with as many parts as run concurrently."""
    samples, channels = x.shape[:2]
    rows = samples * channels if per_sample else channels
    # Rows are summed separately; where their values alternate in memory, per sample.
    apart = rows if x.is_contiguous() else rows // max(1, channels)
    parts = min(MOST_PARTS, x.numel() // (PART * max(1, apart)))
    return x.new_empty((max(1, parts), count, rows), dtype=torch.float64)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which the statistics of values of a dtype are used."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense(x: Tensor) -> Tensor:
    """Returns the tensor, copied if its memory is neither [N, C, ...] nor [N, ..., C] in order."""
    if x.is_contiguous() or x.permute(_channels_last(x.dim())).is_contiguous():
        return x
    return x.contiguous()


def strided_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor, copied if the strides of the dense tensor `like` are others."""
    return x if x.stride() == like.stride() else torch.empty_like(like, dtype=x.dtype).copy_(x)


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Returns values [C] in a shape that broadcasts to `like` [N, C, ...]."""
    return values.view(1, -1, *(1 for _ in range(like.dim() - 2)))


def _channels_last(dims: int) -> tuple[int, ...]:
    return (0, *range(2, dims), 1)
