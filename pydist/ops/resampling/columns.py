"""Shows windows as dims or columns: `unfold` and `fold`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.dims import canonical
from pydist.ops.resampling.reads import ReadRange, Reads, moved_points, planning
from pydist.tensor import ShardedTensor, implements, view_of

_Pair = int | Sequence[int]


@implements(torch.Tensor.unfold)
def unfold_dim(input: ShardedTensor, dimension: int, size: int, step: int) -> ShardedTensor:
    """Shows the windows of a dim along a new last dim; a window is on the rank of its center."""
    d = canonical(dimension, input.dim())
    layout = input.layout
    if not 0 <= size <= layout.shape[d] or step < 1:
        raise RuntimeError(
            f"unfold: size {size} and step {step} along an extent of {layout.shape[d]}: a size up "
            "to the extent and a step above 0 are possible"
        )

    def make() -> Reads:
        with planning():
            count = (layout.shape[d] - size) // step + 1
            first = torch.arange(count) * step
            shape = [count if i == d else n for i, n in enumerate(layout.shape)]
            split = layout.splits[d]
            points = [] if split is None else split.partition.points
            moved = {d: [-(-(p - size // 2) // step) for p in points]}
            span = ReadRange(first, first + size - 1)
            return Reads(layout, moved_points(layout, shape, moved), {d: span})

    reads = layout.mesh.session.plan(("unfold", layout, d, size, step), make)
    box = reads.gather(input)
    if reads.out.local_shape[d]:
        local = box.unfold(d, size, step)
    else:
        local = box.unsqueeze(-1).expand(*box.shape, size)
    out = Layout(layout.mesh, (*reads.out.shape, size), (*reads.out.splits, None))
    return view_of(input, local, out, is_copy=not reads.stays, is_expanded=step < size)


def _pair(value: _Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


@implements(F.unfold)
def unfold(
    input: ShardedTensor,
    kernel_size: _Pair,
    dilation: _Pair = 1,
    padding: _Pair = 0,
    stride: _Pair = 1,
) -> Tensor:
    """Makes a column of each window of an image: [N, C × window, windows]."""
    rims = _pair(padding)
    x: Tensor = F.pad(input, (rims[1], rims[1], rims[0], rims[0])) if any(rims) else input
    is_batch = x.dim() == 4
    x = x if is_batch else x.unsqueeze(0)
    for d, k, dil, step in zip((2, 3), *map(_pair, (kernel_size, dilation, stride)), strict=True):
        x = x.unfold(d, dil * (k - 1) + 1, step)[..., ::dil]
    x = x.permute(0, 1, 4, 5, 2, 3)
    x = x.reshape(x.shape[0], math.prod(x.shape[1:4]), -1)
    return x if is_batch else x.squeeze(0)


@implements(F.fold)
def fold(
    input: ShardedTensor,
    output_size: _Pair,
    kernel_size: _Pair,
    dilation: _Pair = 1,
    padding: _Pair = 0,
    stride: _Pair = 1,
) -> Tensor:
    """Adds columns to an image, each at its window: a transposed convolution of unit kernels."""
    kernel, sizes = _pair(kernel_size), _pair(output_size)
    steps, rims, dils = _pair(stride), _pair(padding), _pair(dilation)
    x: Tensor = input if input.dim() == 3 else input.unsqueeze(0)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dils, strict=True)]
    each = list(zip(sizes, rims, reach, steps, strict=True))
    counts = [(n + 2 * p - r) // s + 1 for n, p, r, s in each]
    # Rows and columns at the end that no window reaches.
    rest = [n + 2 * p - r - s * (c - 1) for (n, p, r, s), c in zip(each, counts, strict=True)]
    taps = math.prod(kernel)
    x = x.reshape(*x.shape[:2], *counts)
    channels = x.shape[1] // taps
    weight = torch.eye(taps, dtype=x.dtype, device=x.device).reshape(taps, 1, *kernel)
    weight = weight.repeat(channels, 1, 1, 1)
    with torch.autocast(x.device.type, enabled=False):  # it has no rule for columns
        image = F.conv_transpose2d(x, weight, None, steps, rims, rest, channels, dils)
    return image if input.dim() == 3 else image.squeeze(0)
