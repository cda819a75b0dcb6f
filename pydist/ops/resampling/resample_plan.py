"""Plans an interpolation of a shard: by torch's kernel, or tap by tap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from pydist.backend.conv import in_format
from pydist.backend.statistics import statistics_dtype
from pydist.exchange.memory_formats import is_channels_last
from pydist.layout import Layout
from pydist.ops.resampling.reads import ReadRange, Reads, take_indices
from pydist.ops.resampling.taps import (
    Resize,
    Taps,
    taps_of,
    upsample,
    without_adjoint,
)

# A shard's first input moves down by less than this, to an input at which a global output starts
# exactly, so that torch's own kernel can run on the shard.
_MOST_EXTRA = 4


class ResamplePlan:
    """Plan that runs an interpolation on the inputs gathered for this rank.

    Args:
        layout, out: of the input and of the result.
        sizes: old and new extent of each spatial dim.
        mode: as in `interpolate`, except "area".
        align_corners: as in `interpolate`.
        like: a tensor of the input's dtype and device.

    Attributes:
        reads: the inputs that each rank reads.
        not_adjoint: a size at which torch's forward and backward read different elements.
    """

    def __init__(
        self,
        layout: Layout,
        out: Layout,
        sizes: Sequence[Resize],
        mode: str,
        align_corners: bool,
        like: Tensor,
    ) -> None:
        self.mode, self.align_corners = mode, align_corners
        taps = {
            dim: taps_of(mode, size, align_corners, len(sizes), like)
            for dim, size in enumerate(sizes, start=2)
        }
        self.not_adjoint = without_adjoint(mode, sizes, align_corners, like)
        spans = {d: _span(tap.indices, sizes[d - 2]) for d, tap in taps.items()}
        self.reads = Reads(layout, out, spans)
        own = {d: self._own(d, tap) for d, tap in taps.items()}
        self._call = self._own_call(sizes, own, like)
        self._taps = {
            d: tap.to(like.device)
            for d, tap in own.items()
            if tap.weights is not None or not self.reads.copies_all(d, tap.indices[0])
        }

    def run(self, box: Tensor) -> Tensor:
        """Computes this rank's outputs from the inputs that they read.

        It runs torch's kernel if that gives the same values from these inputs alone; otherwise it
        adds up the taps, the last dim first, as torch's kernel does.
        """
        if self._call is not None:
            first, counts, scales = self._call
            y = upsample(self.mode, box, counts, scales, self.align_corners)
            if not any(first):
                return y
            channels_last = is_channels_last(y)
            for dim, start in enumerate(first, start=2):
                y = y.narrow(dim, start, self.reads.out.local_shape[dim])
            return in_format(y, channels_last)
        if not self._taps:
            return box.clone()
        dtype = box.dtype
        if not self.mode.startswith("nearest"):
            box = box.to(statistics_dtype(dtype))
        for dim in sorted(self._taps, reverse=True):
            box = _blend(box, dim, self._taps[dim])
        return box.to(dtype)

    def _own(self, dim: int, taps: Taps) -> Taps:
        box = self.reads.out.box
        weights = None if taps.weights is None else taps.weights[:, box.lo[dim] : box.hi[dim]]
        return Taps(self.reads.local(dim, taps.indices), weights)

    def _own_call(
        self, sizes: Sequence[Resize], own: Mapping[int, Taps], like: Tensor
    ) -> tuple[list[int], list[int], list[float | None]] | None:
        """Returns the first outputs to keep, extents and scales of a torch call on the box."""
        box, out = self.reads.box, self.reads.out.box
        if box.empty or out.empty:
            return None
        first, found = [], []
        for dim, size in enumerate(sizes, start=2):
            start = _output_at(box.lo[dim], size)
            count = -1 if start is None else out.hi[dim] - start
            if start is None or not start <= out.lo[dim]:
                return None
            scale = size.scale
            if box.shape[dim] != size.extent or count != size.out:
                scale = scale or size.out / size.extent
            mine = Resize(box.shape[dim], count, scale)
            taps = taps_of(self.mode, mine, self.align_corners, len(sizes), like)
            keep = slice(out.lo[dim] - start, None)
            if not _same(taps, keep, own[dim]):
                return None
            first.append(keep.start)
            found.append(mine)
        if without_adjoint(self.mode, found, self.align_corners, like) is not None:
            return None
        return first, [size.out for size in found], [size.scale for size in found]


def _span(indices: Tensor, size: Resize) -> ReadRange:
    """Returns the inputs that outputs read, from one at which a global output starts."""
    first, last = indices.min(0).values, indices.max(0).values
    step = size.extent // math.gcd(size.extent, size.out)
    return ReadRange(first // step * step if step <= _MOST_EXTRA else first, last)


def _output_at(start: int, size: Resize) -> int | None:
    """Returns the output that begins exactly at an input, or `None`."""
    whole, rest = divmod(start * size.out, size.extent)
    return None if rest else whole


def _same(taps: Taps, keep: slice, others: Taps) -> bool:
    if (taps.weights is None) != (others.weights is None):
        return False
    if not taps.indices[:, keep].equal(others.indices):
        return False
    if taps.weights is None or others.weights is None:
        return True
    return taps.weights[:, keep].equal(others.weights)


def _blend(x: Tensor, dim: int, taps: Taps) -> Tensor:
    """Computes weighted sums of a dim's elements; differentiable to any order."""
    if taps.weights is None:
        return take_indices(x, dim, taps.indices[0])
    total = None
    for index, weight in zip(taps.indices, taps.weights, strict=True):
        part = take_indices(x, dim, index) * weight.view(-1, *(1,) * (x.dim() - 1 - dim))
        total = part if total is None else total + part
    assert total is not None
    return total
