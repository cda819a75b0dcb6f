"""Handles periodic and reversed dims: circular padding, roll and flip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.redistribution import BoxGatherer
from pydist.ops.dims import canonical, canonical_all
from pydist.ops.empty import cat_shards
from pydist.ops.resampling.reads import ReadRange, Reads, moved_points, planning
from pydist.partition import Box
from pydist.tensor import ShardedTensor, implements, local_of, wrap


def circular_pad(x: ShardedTensor, rims: Sequence[tuple[int, int]]) -> ShardedTensor:
    """Pads dims circularly, by at most their extent; it does not crop.

    Raises:
        UsageError: the padding exceeds the extent. (After a crop torch does not check this, and
            its result contains uninitialized memory.)
    """
    if any(max(rim) > n for rim, n in zip(rims, x.shape, strict=True)):
        raise UsageError(
            f"circular padding by {rims} of {tuple(x.shape)} goes round more than once"
        )
    split_dims = x.layout.split_dims
    for dim in split_dims:
        if rims[dim] != (0, 0):
            x = _pad_around(x, dim, *rims[dim])
    whole = [(0, 0) if d in split_dims else rim for d, rim in enumerate(rims)]
    if not any(rim != (0, 0) for rim in whole):
        return x
    shape = [n + before + after for n, (before, after) in zip(x.shape, whole, strict=True)]
    # torch pads up to three dims, of samples without a batch dim too.
    added = [n for rim in reversed(whole[1:][-3:]) for n in rim]
    return wrap(F.pad(local_of(x), added, "circular"), x.layout.replace(shape), x)


def _pad_around(x: ShardedTensor, dim: int, before: int, after: int) -> ShardedTensor:
    """Pads a split dim circularly; the first part owns the rim before, the last the rim after."""
    layout = x.layout
    extent, split = layout.shape[dim], layout.splits[dim]
    assert split is not None
    shape = [n + (before + after if d == dim else 0) for d, n in enumerate(layout.shape)]
    out = moved_points(layout, shape, {dim: [p + before for p in split.partition.points]})
    rims = [(0, 0)] * split.partition.parts
    rims[0], rims[-1] = (extent - before, extent), (0, after)
    rim = _gather(x, dim, rims)
    is_first = layout.part(dim, layout.mesh.sample_index) == 0
    parts = (rim, local_of(x)) if is_first else (local_of(x), rim)
    return wrap(torch.cat(parts, dim), out, x)


@implements(torch.roll, torch.Tensor.roll)
def roll(
    input: ShardedTensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None
) -> ShardedTensor:
    """Shifts elements periodically, along dims or in the flattened tensor."""
    amounts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    along = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    layout = input.layout
    if not along and len(amounts) == 1 and layout.split_dims:
        flat: Any = input.flatten()
        rolled: Any = roll(flat, amounts, 0)
        found: ShardedTensor = rolled.reshape(input.shape)
        return found
    if len(along) != len(amounts) or not layout.split_dims:
        # torch raises its own error if the numbers of shifts and dims differ.
        return wrap(torch.roll(local_of(input), amounts, along), layout, input)
    total: dict[int, int] = {}
    for dim, shift in zip(along, amounts, strict=True):
        d = canonical(dim, input.dim())
        total[d] = total.get(d, 0) + shift
    far = {d: s % max(1, layout.shape[d]) for d, s in total.items() if d in layout.split_dims}
    far = {d: s for d, s in far.items() if s}
    here = {d: s for d, s in total.items() if d not in layout.split_dims}
    if here or not far:
        # A shift of dim 0 by 0 makes a copy.
        local = torch.roll(local_of(input), tuple(here.values()) or 0, tuple(here) or 0)
        input = wrap(local, layout, input)
    for dim, shift in far.items():
        input = _roll_split(input, dim, shift)
    return input


def _roll_split(x: ShardedTensor, dim: int, shift: int) -> ShardedTensor:
    """Rolls a split dim by two exchanges: of elements before and after the wraparound."""
    layout = x.layout
    extent, split = layout.shape[dim], layout.splits[dim]
    assert split is not None
    intervals = [split.partition.interval(p) for p in range(split.partition.parts)]
    before = [((lo - shift) % extent, hi - lo) for lo, hi in intervals]
    before = [(lo, min(extent, lo + size)) for lo, size in before]
    rest = [
        (0, hi - lo - (stop - start))
        for (lo, hi), (start, stop) in zip(intervals, before, strict=True)
    ]
    parts = [_gather(x, dim, before)]
    if any(interval != (0, 0) for interval in rest):
        parts.append(_gather(x, dim, rest))
    return wrap(cat_shards(parts, dim), layout, x)


@implements(torch.flip, torch.Tensor.flip)
def flip(input: ShardedTensor, *dims: Any, **kw: Any) -> ShardedTensor:
    """Reverses dims; the layout does not change."""
    named = kw.get("dims", dims[0] if len(dims) == 1 else dims)
    asked = canonical_all((named,) if isinstance(named, int) else named, input.dim())
    layout = input.layout
    turned = [d for d in asked if d in layout.split_dims]
    if not turned:
        return wrap(torch.flip(local_of(input), asked), layout, input)
    key = ("flip", layout, tuple(turned))

    def make() -> Reads:
        with planning():
            sources = {d: torch.arange(layout.shape[d]).flip(0) for d in turned}
        return Reads(layout, layout, {d: ReadRange(s, s) for d, s in sources.items()})

    reads = layout.mesh.session.plan(key, make)
    return wrap(torch.flip(reads.gather(input), asked), layout, input)


@implements(torch.fliplr, torch.Tensor.fliplr)
def fliplr(input: ShardedTensor) -> ShardedTensor:
    """Reverses the second dim."""
    return flip(input, 1)


@implements(torch.flipud, torch.Tensor.flipud)
def flipud(input: ShardedTensor) -> ShardedTensor:
    """Reverses the first dim."""
    return flip(input, 0)


@implements(torch.rot90, torch.Tensor.rot90)
def rot90(input: ShardedTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Rotates a plane by k quarter turns, from its first dim to its second; splits turn along."""
    if len(dims) != 2:
        raise RuntimeError(f"expected total rotation dims == 2, but got dims = {len(dims)}")
    first, second = canonical_all(dims, input.dim())
    match k % 4:
        case 1:
            return flip(input, second).transpose(first, second)
        case 2:
            return flip(input, (first, second))
        case 3:
            return flip(input, first).transpose(first, second)
    return input.clone()


def _gather(x: ShardedTensor, dim: int, intervals: Sequence[tuple[int, int]]) -> Tensor:
    """Gathers an interval of a split dim for each of its parts, within the rank's other dims."""
    layout = x.layout
    key = ("intervals", layout, dim, tuple(intervals))

    def make() -> BoxGatherer:
        needed = []
        for rank, own in enumerate(layout.boxes):
            lo, hi = list(own.lo), list(own.hi)
            lo[dim], hi[dim] = intervals[layout.part(dim, rank)]
            needed.append(Box(lo, hi))
        return BoxGatherer(layout, needed)

    return layout.mesh.session.plan(key, make)(local_of(x))
