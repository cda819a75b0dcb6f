"""Statistics of every channel of a shard, in one pass over memory, and their merging over ranks.

A channel's statistics are its count n, mean m and M2 = Σ (x - m)². Those of parts merge without
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
_BLOCK = 1 << 17


class Moments(NamedTuple):
    """The statistics of C channels, in fp64.

    Attributes:
        n: values a channel, a tensor of one element.
        mean: [C].
        m2: sum of squared deviations from the mean, [C].
    """

    n: Tensor
    mean: Tensor
    m2: Tensor

    def packed(self) -> Tensor:
        """One row [1 + 2 C]."""
        return torch.cat([self.n.view(1), self.mean, self.m2])


def unpacked(rows: Tensor) -> Moments:
    """The moments in rows [..., 1 + 2 C]; their parts have the leading dims of the rows."""
    channels = rows.shape[-1] // 2
    return Moments(*rows.split([1, channels, channels], -1))


def merged(rows: Tensor) -> Moments:
    """The moments of the union of parts.

    Args:
        rows: [parts, ..., 1 + 2 C]; a part may be empty. The result does not depend on who
            merges, only on the parts and their order.
    """
    parts = unpacked(rows)
    n = parts.n.sum(0)
    mean = (parts.n * parts.mean).sum(0) / n.clamp(min=1)
    between = parts.n * (parts.mean - mean).square()
    return Moments(n, mean, (parts.m2 + between).sum(0))


def moments(x: Tensor) -> Moments:
    """The statistics of the channels of x [N, C, ...], which may be empty.

    x is read from memory once. The sums of a block are formed in fp32 (fp64 for fp64), those of
    the blocks merged in fp64: where torch adds up a channels-last tensor channel by channel in
    fp32, variances of a million values are off by 1e-3, here by 1e-8.
    """
    channels = x.shape[1]
    rows = []
    workspace = _workspace(x)
    for (block,) in channel_blocks(dense(x)):
        count = block.numel() // channels
        mean = block.sum((0, 2), keepdim=True, dtype=workspace.dtype).div_(count)
        centred = torch.sub(block, mean, out=_piece(workspace, block))
        m2 = centred.square_().sum((0, 2))
        rows.append(torch.cat([mean.new_full((1,), count), mean.view(-1), m2]))
    if not rows:
        return Moments(*torch.zeros(1 + 2 * channels).double().split([1, channels, channels]))
    return merged(torch.stack(rows).double())


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """Σ dy and Σ dy (x - mean) of every channel, [2, C] in fp64; x and dy are read once.

    Args:
        grad: dL/dy, of the shape of x.
        x: [N, C, ...], may be empty.
        mean: [C], in the dtype in which the sums of a block are formed.
    """
    totals = []
    workspace = _workspace(x)
    shift = mean.view(1, -1, 1)
    x = dense(x)
    for block, grad_block in channel_blocks(x, strided_like(grad, x)):
        centred = torch.sub(block, shift, out=_piece(workspace, block))
        product = centred.mul_(grad_block).sum((0, 2))
        totals.append(torch.stack([grad_block.sum((0, 2), dtype=product.dtype), product]))
    if not totals:
        return torch.zeros(2, x.shape[1], dtype=torch.float64)
    return torch.stack(totals).double().sum(0)


def combined(grad: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The sum a dy + b x + c with coefficients [C]; only the result is allocated."""
    x = dense(x)
    grad = strided_like(grad, x)
    out = torch.empty_like(x)
    if out.dtype == a.dtype:
        a, b, c = (per_channel(each, x) for each in (a, b, c))
        return torch.addcmul(c, x, b, out=out).addcmul_(grad, a)
    a, b, c = (each.view(1, -1, 1) for each in (a, b, c))
    workspace = _workspace(x)
    for block, grad_block, target in channel_blocks(x, grad, out):
        part = torch.addcmul(c, block, b, out=_piece(workspace, block))
        target.copy_(part.addcmul_(grad_block, a))
    return out


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype the statistics of values of a dtype are used."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def channel_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces [B, C, L] of dense tensors of one shape [N, C, ...] and equal strides, as views."""
    first = tensors[0]
    if not first.numel():
        return
    samples, channels = first.shape[:2]
    last = _channels_last(first.dim())
    if first.permute(last).is_contiguous():
        views = [t.permute(last).view(-1, channels, 1) for t in tensors]
    else:
        views = [t.view(samples, channels, -1) for t in tensors]
    voxels = views[0].shape[2]
    together = max(1, _BLOCK // (channels * voxels))
    for rows in zip(*(v.split(together) for v in views), strict=True):
        yield from zip(*(v.split(max(1, _BLOCK // channels), 2) for v in rows), strict=True)


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
    size = min(x.numel(), max(_BLOCK, x.shape[1]))
    return x.new_empty(size, dtype=statistics_dtype(x.dtype))


def _piece(workspace: Tensor, block: Tensor) -> Tensor:
    return workspace[: block.numel()].view(block.shape)
