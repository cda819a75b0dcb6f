"""Slices, which leave elements on the ranks that own them, also along split dims."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydist.layout import Layout, Split
from pydist.ops.dims import canonical, numpy_names
from pydist.ops.views import moves
from pydist.partition import Partition
from pydist.tensor import ShardedTensor, implements, local_of, view_of, wrap
from pydist.tensor.aliasing import ViewPart, view_at
from pydist.tensor.operands import redistribute, whole_operand

IndexEntry = int | slice | None
"""Entry of an index for one dim; `None` adds a dim."""


class Region(NamedTuple):
    """Selection that an index of integers, slices and `None` makes, before integers remove dims.

    Attributes:
        local: the index of this rank's part in its shard; an integer becomes a slice.
        layout: of the selection, in which an integer's dim has extent 1.
        removed: the dims of the selection that integers remove.
        added: the dims of the selection that `None` adds.
    """

    local: tuple[slice | None, ...]
    layout: Layout
    removed: tuple[int, ...]
    added: tuple[int, ...]


def region_of(layout: Layout, entries: Sequence[IndexEntry]) -> Region:
    """Returns the region of a selection, whose elements stay on the ranks that own them.

    Args:
        layout: of the tensor.
        entries: one for each dim, in order, with `None` in between.

    Raises:
        IndexError: an integer is out of range.
        ValueError: a step is not positive.
    """
    local: list[slice | None] = []
    shape: list[int] = []
    splits: list[Split | None] = []
    removed, added = [], []
    dims = itertools.count()
    for entry in entries:
        if entry is None:
            added.append(len(shape))
            local.append(None)
            shape.append(1)
            splits.append(None)
            continue
        dim = next(dims)
        if isinstance(entry, int):
            removed.append(len(shape))
            first = _checked(entry, dim, layout.shape[dim])
            own, extent, split = _along(layout, dim, slice(first, first + 1))
        else:
            own, extent, split = _along(layout, dim, entry)
        local.append(own)
        shape.append(extent)
        splits.append(split)
    return Region(tuple(local), Layout(layout.mesh, shape, splits), tuple(removed), tuple(added))


def _checked(index: int, dim: int, extent: int) -> int:
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {extent}")
    return index % extent


def _along(layout: Layout, dim: int, entry: slice) -> tuple[slice, int, Split | None]:
    """Returns this rank's part of a slice in its shard, the slice's extent, and its split."""
    extent, split = layout.shape[dim], layout.splits[dim]
    if entry == slice(None):
        return entry, extent, split
    start, stop, step = entry.indices(extent)
    if step < 1:
        raise ValueError("step must be greater than zero")
    count = len(range(start, stop, step))
    if split is None:
        return slice(start, start + count * step, step), count, None
    before = [min(count, max(0, -((start - p) // step))) for p in split.partition.points]
    lo, hi = layout.box.lo[dim], layout.box.hi[dim]
    first, last = (min(count, max(0, -((start - p) // step))) for p in (lo, hi))
    begin = start + first * step - lo if last > first else 0
    own = slice(begin, begin + (last - first) * step, step)
    return own, count, Split(split.axes, Partition(before))


def sliced(x: ShardedTensor, entries: Sequence[IndexEntry]) -> ShardedTensor:
    """Indexes with one integer or slice for each dim, and `None`.

    An element that an integer selects along a split dim is sent to all ranks that split the dim.
    """
    region = region_of(x.layout, entries)
    layout, local = region.layout, local_of(x)[region.local]
    part = part_of(x, entries)
    if not region.removed:
        return view_of(x, local, layout, part=part, index=tuple(entries))
    selected = wrap(local, layout, x)
    moved = redistribute(selected, layout.replace(changes=dict.fromkeys(region.removed)))
    left = [d for d in range(len(layout.shape)) if d not in region.removed]
    out = Layout(layout.mesh, [layout.shape[d] for d in left], [layout.splits[d] for d in left])
    local = local_of(moved).squeeze(region.removed)
    return view_of(x, local, out, moves(selected, moved.layout), part, tuple(entries))


def part_of(x: ShardedTensor, entries: Sequence[IndexEntry]) -> ViewPart:
    """Returns the box of `x` that contains the selection of an index."""
    box = []
    for extent, entry in zip(x.shape, (e for e in entries if e is not None), strict=True):
        if isinstance(entry, int):
            box.append((entry % extent, entry % extent + 1))
        else:
            start, stop, _ = entry.indices(extent)
            box.append((start, max(start, stop)))
    return view_at(x), tuple(box)


def along(x: ShardedTensor, dim: int, entry: int | slice) -> ShardedTensor:
    """Returns a slice, or one element, of one dim.

    Args:
        x: the tensor.
        dim: the dim, 0 or above.
        entry: an index, which removes the dim, or a slice of it.
    """
    entries: list[IndexEntry] = [slice(None)] * x.dim()
    entries[dim] = entry
    return sliced(x, entries)


def full_index(index: Any, dims: int) -> list[Any]:
    """Expands an index's Ellipsis, or its missing entries at the end, to full slices.

    Raises:
        IndexError: there are more entries than dims.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    used = sum(_consumes(entry) for entry in given)
    if used > dims:
        raise IndexError(f"too many indices for tensor of dimension {dims}")
    at = next((i for i, entry in enumerate(given) if isinstance(entry, EllipsisType)), None)
    missing = [slice(None)] * (dims - used)
    if at is None:
        return given + missing
    behind = [entry for entry in given[at:] if not isinstance(entry, EllipsisType)]
    return given[:at] + missing + behind


def _consumes(entry: Any) -> int:
    """Returns the number of dims that an entry of an index consumes."""
    if entry is None or isinstance(entry, EllipsisType):
        return 0
    is_mask = isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.dim() if is_mask else 1


@implements(torch.select, torch.Tensor.select)
@numpy_names
def select(input: ShardedTensor, dim: int, index: int) -> ShardedTensor:
    """Returns one element of a dim."""
    return along(input, canonical(dim, input.dim()), operator.index(index))


@implements(torch.narrow, torch.Tensor.narrow)
@numpy_names
def narrow(input: ShardedTensor, dim: int, start: int, length: int) -> ShardedTensor:
    """Returns `length` elements of a dim."""
    d = canonical(dim, input.dim())
    extent = input.shape[d]
    begin = int(start)
    if not -extent <= begin <= extent:
        raise IndexError(f"start ({begin}) out of range [{-extent}, {extent}] of dim {d}")
    begin += extent if begin < 0 else 0
    if length < 0 or begin + length > extent:
        raise RuntimeError(
            f"start ({begin}) + length ({length}) exceeds dimension size ({extent})."
        )
    return along(input, d, slice(begin, begin + length))


def pieces(x: ShardedTensor, dim: int, points: Sequence[int]) -> tuple[ShardedTensor, ...]:
    """Returns the parts of a dim between consecutive points.

    Args:
        x: the tensor.
        dim: the dim, 0 or above.
        points: ascending indices, from the beginning of the first part to the end of the last.
    """
    return tuple(along(x, dim, slice(a, max(a, b))) for a, b in itertools.pairwise(points))


@implements(torch.split, torch.Tensor.split, torch.Tensor.split_with_sizes, torch.split_with_sizes)
@numpy_names
def split(
    tensor: ShardedTensor, split_size_or_sections: Any = None, dim: int = 0, **named: Any
) -> tuple[ShardedTensor, ...]:
    """Splits a dim into parts of equal (the last may be smaller) or given extents."""
    asked = next(iter(named.values())) if named else split_size_or_sections
    d = canonical(dim, tensor.dim())
    extent = tensor.shape[d]
    if isinstance(asked, int):
        if asked < 1 and not asked == extent == 0:
            raise RuntimeError(f"split expects split_size be positive, but got {asked}")
        return pieces(tensor, d, [*range(0, max(extent, 1), max(asked, 1)), extent])
    if sum(asked) != extent or min(asked, default=0) < 0:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {extent} "
            f"(input tensor's size at dimension {d}), but got split_sizes={list(asked)}"
        )
    return pieces(tensor, d, [0, *itertools.accumulate(asked)])


@implements(torch.chunk, torch.Tensor.chunk)
@numpy_names
def chunk(input: ShardedTensor, chunks: int, dim: int = 0) -> tuple[ShardedTensor, ...]:
    """Splits a dim into at most `chunks` parts, all of the same extent except the last."""
    if chunks < 1:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    d = canonical(dim, input.dim())
    if input.shape[d] == 0:
        return pieces(input, d, [0] * (chunks + 1))
    return split(input, -(-input.shape[d] // chunks), d)


@implements(torch.tensor_split, torch.Tensor.tensor_split)
@numpy_names
def tensor_split(
    input: ShardedTensor, *given: Any, dim: int = 0, **named: Any
) -> tuple[ShardedTensor, ...]:
    """Splits a dim into parts as equal as possible, or at given indices."""
    asked, *at = (*given, *named.values())
    d = canonical(at[0] if at else dim, input.dim())
    extent = input.shape[d]
    if isinstance(asked, Tensor):
        asked = whole_operand(asked, input).tolist()
    if isinstance(asked, int):
        if asked < 1:
            raise RuntimeError(f"number of sections must be larger than 0, got {asked}")
        return pieces(
            input, d, [extent // asked * i + min(i, extent % asked) for i in range(asked + 1)]
        )
    return pieces(input, d, [0, *(slice(i).indices(extent)[1] for i in asked), extent])


@implements(torch.unbind, torch.Tensor.unbind)
@numpy_names
def unbind(input: ShardedTensor, dim: int = 0) -> tuple[ShardedTensor, ...]:
    """Returns all elements of a dim; a split dim is gathered once for all of them."""
    d = canonical(dim, input.dim())
    whole = redistribute(input, input.layout.replace(changes={d: None}))
    is_copy = moves(input, whole.layout)
    results = []
    for i in range(input.shape[d]):
        element = along(whole, d, i)
        entries: list[IndexEntry] = [slice(None)] * input.dim()
        entries[d] = i
        part = part_of(input, entries)
        results.append(
            view_of(input, element._shard, element.layout, is_copy, part, tuple(entries))
        )
    return tuple(results)
