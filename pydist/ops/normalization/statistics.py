"""Statistics of every row of a shard, in one pass over memory, and their merging over parts.

A row is what has a mean and a variance of its own, or a part of that: a channel, a channel of one
sample. Its statistics are its count n, mean m and M2 = Σ (x - m)². Those of parts merge without
cancellation: n = Σ n_i, m = Σ n_i m_i / n, M2 = Σ M2_i + Σ n_i (m_i - m)².

Source: Chan, Golub, LeVeque (1983), "Algorithms for computing the sample variance".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of a block: several passes over one stay in a core's cache, and the calls that they
# take cost little beside them (7 % of the time at 2 µs a call).
BLOCK = 1 << 17


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


def moments(x: Tensor) -> Moments:
    """The statistics of the rows of a dense x [N, R, ...], which may be empty.

    x is read from memory once. The sums of a block are formed in fp32 (fp64 for fp64), those of
    the blocks merged in fp64: where torch adds up a channels-last tensor channel by channel in
    fp32, variances of a million values are off by 1e-3, here by 1e-8.
    """
    count = x.numel() // max(1, x.shape[1])
    if not count:
        nothing = x.new_zeros(x.shape[1], dtype=torch.float64)
        return Moments(x.new_zeros(1, dtype=torch.float64), nothing, nothing)
    workspace = _workspace(x)
    bands = [_moments_of_band(band, workspace) for (band,) in _bands(x)]
    if len(bands) == 1:
        return bands[0]
    return Moments(bands[0].n, torch.cat([b.mean for b in bands]), torch.cat([b.m2 for b in bands]))


def _moments_of_band(band: Tensor, workspace: Tensor) -> Moments:
    rows = band.shape[1]
    counts, means, m2s = [], [], []
    for (block,) in row_blocks(band):
        count = block.numel() // rows
        mean = block.sum((0, 2), keepdim=True, dtype=workspace.dtype).div_(count)
        centred = torch.sub(block, mean, out=_piece(workspace, block))
        counts.append([count])
        means.append(mean.view(-1))
        m2s.append(centred.square_().sum((0, 2)))
    n = torch.tensor(counts, dtype=torch.float64, device=band.device)
    if len(counts) == 1:
        return Moments(n[0], means[0].double(), m2s[0].double())
    return merged(Moments(n, torch.stack(means).double(), torch.stack(m2s).double()))


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """Σ dy and Σ dy (x - mean) of every row, [2, R] in fp64; x and dy are read once.

    Args:
        grad: dL/dy, of the shape and strides of x.
        x: dense, [N, R, ...], may be empty.
        mean: [R], in the dtype in which the sums of a block are formed.
    """
    if not x.numel():
        return x.new_zeros(2, x.shape[1], dtype=torch.float64)
    workspace = _workspace(x)
    totals = []
    for x_band, grad_band, mean_band in _bands(x, grad, mean):
        shift = mean_band.view(1, -1, 1)
        sums = []
        for block, grad_block in row_blocks(x_band, grad_band):
            centred = torch.sub(block, shift, out=_piece(workspace, block))
            product = centred.mul_(grad_block).sum((0, 2))
            sums.append(torch.stack([grad_block.sum((0, 2), dtype=product.dtype), product]))
        totals.append(torch.stack(sums).double().sum(0))
    return torch.cat(totals, 1)


def combine(out: Tensor, grad: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> None:
    """Writes a dy + b x + c into `out`.

    Args:
        out: of the shape and strides of x.
        grad: dL/dy, of the shape and strides of x.
        x: dense, [N, R, ...], may be empty.
        a: [R], in the dtype in which it is computed, as are `b` and `c`.
        b: [R].
        c: [R].
    """
    if out.dtype == a.dtype:
        a, b, c = (per_channel(each, x) for each in (a, b, c))
        torch.addcmul(c, x, b, out=out).addcmul_(grad, a)
        return
    if not x.numel():
        return
    workspace = _workspace(x)
    for x_band, grad_band, out_band, *values in _bands(x, grad, out, a, b, c):
        a, b, c = (each.view(1, -1, 1) for each in values)
        for block, grad_block, target in row_blocks(x_band, grad_band, out_band):
            part = torch.addcmul(c, block, b, out=_piece(workspace, block))
            target.copy_(part.addcmul_(grad_block, a))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype the statistics of values of a dtype are used."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces [B, R, L] of dense tensors of one shape [N, R, ...] and equal strides, as views."""
    first = tensors[0]
    if not first.numel():
        return
    samples, rows = first.shape[:2]
    last = _channels_last(first.dim())
    if first.permute(last).is_contiguous():
        views = [t.permute(last).view(-1, rows, 1) for t in tensors]
    else:
        views = [t.view(samples, rows, -1) for t in tensors]
    if first.numel() <= BLOCK:
        yield tuple(views)
        return
    voxels = views[0].shape[2]
    together = max(1, BLOCK // (rows * voxels))
    for part in zip(*(v.split(together) for v in views), strict=True):
        yield from zip(*(v.split(max(1, BLOCK // rows), 2) for v in part), strict=True)


def _bands(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors [N, R, ...] and values [R], by as many rows as a block takes whole.

    Of a contiguous sample these are one piece of memory, which blocks of all its rows are not.
    """
    rows = x.shape[1]
    if x.shape[0] == 1 and x.is_contiguous():
        rows = max(1, BLOCK * rows // x.numel())
    if rows >= x.shape[1]:
        return iter([(x, *others)])
    parts = (t.split(rows, 1 if t.dim() > 1 else 0) for t in (x, *others))
    return zip(*parts, strict=True)


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


def _workspace(x: Tensor) -> Tensor:
    size = min(x.numel(), max(BLOCK, x.shape[1]))
    return x.new_empty(size, dtype=statistics_dtype(x.dtype))


def _piece(workspace: Tensor, block: Tensor) -> Tensor:
    return workspace[: block.numel()].view(block.shape)
