"""Statistics of every row of a shard, in one pass over memory, and their merging over parts.

A row is what has a mean and a variance of its own, or a part of that: a channel, a channel of one
sample. Its statistics are its count n, mean m and M2 = Σ (x - m)². Those of parts merge without
cancellation: n = Σ n_i, m = Σ n_i m_i / n, M2 = Σ M2_i + Σ n_i (m_i - m)².

Source: Chan, Golub, LeVeque (1983), "Algorithms for computing the sample variance".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pydist._loader import native

# Elements of a part that is summed up by itself: enough to keep a block of threads busy.
PART = 1 << 14
# More parts than a device can run at once only cost their merging.
MOST_PARTS = 512


class Moments(NamedTuple):
    """The statistics of R rows, in fp64.

    Attributes:
        n: values a row, [..., 1].
        mean: [..., R].
        m2: sum of squared deviations from the mean, [..., R].
    """

    n: Tensor
    mean: Tensor
    m2: Tensor


@dataclass(frozen=True)
class Transform:
    """y = act((x - mean) factor + offset), of every row.

    Attributes:
        values: mean, factor and offset, [3, R], in the dtype for statistics. Or [4, R]: by the last
            ones act takes negative values, as PReLU does.
        negative_slope: by which act takes negative values: 1 for none, 0 for ReLU.
    """

    values: Tensor
    negative_slope: float = 1.0


def row_values(mean: Tensor, factor: Tensor, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of the transform (x - mean) factor + shift of tensors of a dtype.

    Args:
        mean: [R] in fp64. Far from zero, what it loses when rounded goes into the offset.
        factor: [R] in fp64.
        shift: [R] or `None`.
        dtype: of x.
    """
    dtype = statistics_dtype(dtype)
    offset = (mean.to(dtype) - mean) * factor
    if shift is not None:
        offset = offset + shift
    return torch.stack([mean, factor, offset]).to(dtype)


def unbiased(statistics: Moments) -> Tensor:
    """The unbiased variance."""
    return statistics.m2 / (statistics.n - 1).clamp(min=1)


def merged(parts: Moments) -> Moments:
    """The moments of the union of parts [parts, ...]; a part may be empty.

    The result does not depend on who merges, only on the parts and their order.
    """
    n = parts.n.sum(0)
    mean = (parts.n * parts.mean).sum(0) / n.clamp(min=1)
    between = parts.n * (parts.mean - mean).square()
    return Moments(n, mean, (parts.m2 + between).sum(0))


def moments(x: Tensor, per_sample: bool = False) -> Moments:
    """The statistics of the rows of a dense x [N, C, ...], which may be empty.

    x is read from memory once. The sums of some thousand values are formed in fp32 (fp64 for
    fp64), of deviations from a mean near by, and merged in fp64: where torch adds up a
    channels-last tensor channel by channel in fp32, variances of a million values are off by 1e-3,
    here by 1e-8.

    Args:
        x: the values.
        per_sample: whether the rows are channels of each sample, [N C], or channels, [C].
    """
    sums = _sums(x, per_sample)
    native.norm_moments(x, sums)
    count = x.numel() // max(1, sums.shape[-1])
    return Moments(sums.new_full((1,), count), sums[0, 0], sums[0, 1])


def apply(out: Tensor, x: Tensor, transform: Transform) -> None:
    """Writes act((x - mean) factor + offset) into `out`; x is read once.

    Args:
        out: of the shape and strides of x.
        x: dense, [N, C, ...], may be empty.
        transform: of rows that are channels, or channels of each sample.
    """
    native.norm_apply(x, out, transform.values, transform.negative_slope)


def gradient_sums(grad: Tensor, x: Tensor, transform: Transform) -> Tensor:
    """Σ g and Σ g (x - mean) of every row, [2, R] in fp64; x and dy are read once.

    g is dy times the derivative of the activation. The mean is that of the transform, rounded.
    Where rows have slopes of their own, a third sum is dL/d slope.

    Args:
        grad: dL/dy, of the shape and strides of x.
        x: dense, [N, C, ...], may be empty.
        transform: what y is.
    """
    per_sample = transform.values.shape[1] != x.shape[1]
    sums = _sums(x, per_sample, len(transform.values) - 1)
    native.norm_grad_sums(grad, x, transform.values, sums, transform.negative_slope)
    return sums[0]


def combine(
    out: Tensor, grad: Tensor, x: Tensor, transform: Transform, coefficients: Tensor
) -> None:
    """Writes a g + b (x - mean) + d into `out`, with g and mean as of `gradient_sums`.

    Args:
        out: of the shape and strides of x.
        grad: dL/dy, of the shape and strides of x.
        x: dense, [N, C, ...], may be empty.
        transform: what y is.
        coefficients: a, b and d, [3, R], in the dtype of the transform.
    """
    native.norm_grad_input(grad, x, out, transform.values, coefficients, transform.negative_slope)


def _sums(x: Tensor, per_sample: bool, count: int = 2) -> Tensor:
    """Memory [parts, count, R] for sums: as many parts as the kernels work on side by side."""
    samples, channels = x.shape[:2]
    rows = samples * channels if per_sample else channels
    # Rows are summed apart; where their values alternate in memory, all of a sample together.
    apart = rows if x.is_contiguous() else rows // max(1, channels)
    parts = min(MOST_PARTS, x.numel() // (PART * max(1, apart)))
    return x.new_empty((max(1, parts), count, rows), dtype=torch.float64)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype the statistics of values of a dtype are used."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense(x: Tensor) -> Tensor:
    """The tensor, copied where its memory is neither [N, C, ...] nor [N, ..., C] in order."""
    if x.is_contiguous() or x.permute(_channels_last(x.dim())).is_contiguous():
        return x
    return x.contiguous()


def strided_like(x: Tensor, like: Tensor) -> Tensor:
    """The tensor, copied where its strides are not those of the dense tensor `like`."""
    return x if x.stride() == like.stride() else torch.empty_like(like, dtype=x.dtype).copy_(x)


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Values [C] in a shape that broadcasts to `like` [N, C, ...]."""
    return values.view(1, -1, *(1 for _ in range(like.dim() - 2)))


def _channels_last(dims: int) -> tuple[int, ...]:
    return (0, *range(2, dims), 1)
