"""Merging and dividing of dims; split dims stay split if the order of the elements allows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydist.grid import SAMPLE_AXES
from pydist.layout import Layout, Split
from pydist.ops.dims import canonical, canonical_all, given_as, numpy_names
from pydist.ops.views import hides_order, in_format, moves
from pydist.partition import Partition, subdivide
from pydist.tensor import ShardedTensor, implements, local_of, refusal, view_of
from pydist.tensor.aliasing import shares_memory
from pydist.tensor.operands import redistribute


def gathered_layout(layout: Layout) -> Layout:
    """Returns the layout for samples that must be unsplit: data parallel if there are enough.

    With at least as many samples as ranks in the group, each rank owns its share of the batch, so
    that no work is done twice. With fewer samples, each rank holds all of them; and with several
    groups too: they may differ in their samples, but a batch norm after it exchanges with all.
    """
    mesh = layout.mesh
    splits: list[Split | None] = [None] * len(layout.shape)
    if mesh.data_size == 1 and 1 < mesh.sample_size <= layout.shape[0]:
        axes = mesh.grid.split(SAMPLE_AXES)
        splits[0] = Split(axes, Partition.even(layout.shape[0], mesh.sample_size))
    return Layout(mesh, layout.shape, splits)


def reshaped(x: ShardedTensor, shape: Sequence[int], is_view: bool = False) -> ShardedTensor:
    """Reshapes `x`, with its elements in the same (row-major) order.

    Args:
        x: the tensor.
        shape: of the result; one entry may be -1.
        is_view: whether torch never copies. Otherwise merging dims gives a view or a copy depending
            on the global strides, which shards may not show: after an in-place change of one
            tensor, use of the other raises an error.
    """
    out = _resolve(shape, x.shape)
    plan = x.mesh.session.plan(("reshape", x.layout, out), lambda: _plan(x.layout, out))
    moved = redistribute(x, plan.source)
    own = local_of(moved)
    local = own.reshape(plan.out.local_shape)
    shares = shares_memory(local, own)
    if plan.hides_order and shares and not is_view:
        local = local.clone()  # torch may return a copy, which may change while x is saved
    is_copy = moves(x, plan.source) or (plan.merges and not (is_view and shares))
    return view_of(x, local, plan.out, is_copy)


def _resolve(shape: Sequence[int], old: Sequence[int]) -> tuple[int, ...]:
    known = math.prod(n for n in shape if n != -1)
    if known:
        free = math.prod(old) // known
    else:  # a group without samples, as in x.view(x.size(0), -1): the extent of the other groups
        free = math.prod(n or 1 for n in old) // math.prod(n or 1 for n in shape if n != -1)
    out = tuple(free if n == -1 else int(n) for n in shape)
    if math.prod(out) != math.prod(old):
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of shape {tuple(old)}")
    return out


# -- layouts of the blocks ------------------------------------------------------------------


class _ReshapePlan(NamedTuple):
    """Plan of a reshape, in which each rank reshapes its own block.

    Attributes:
        source: layout from which each rank reshapes its own block.
        out: layout of the result.
        merges: whether dims are merged; the result is then a view or not by their memory order.
        hides_order: whether there are ranks whose shards do not show that order.
    """

    source: Layout
    out: Layout
    merges: bool = False
    hides_order: bool = False


class _DimGroup(NamedTuple):
    """Smallest set of dims that are reshaped together, old and new with equally many elements.

    An interval of the first old dim is an interval of the elements, and also of the first new dim
    if its ends are multiples of `unit`. So a group can be split only along its first dim.
    """

    old: list[int]
    new: list[int]
    inner_old: int
    inner_new: int

    @property
    def unit(self) -> int:
        return self.inner_new // math.gcd(self.inner_old, self.inner_new)

    def cuts(self, layout: Layout) -> list[Split]:
        return [s for d in self.old if (s := layout.splits[d]) is not None]

    def keeps(self, layout: Layout) -> bool:
        """Returns whether each rank's block of the old shape is one block of the new shape."""
        first, *others = (layout.splits[d] for d in self.old)
        if any(others):
            return False
        return first is None or all(p % self.unit == 0 for p in first.partition.points)


def _plan(layout: Layout, shape: tuple[int, ...]) -> _ReshapePlan:
    if shape == layout.shape:
        return _ReshapePlan(layout, layout)
    if 0 in shape:
        return _plan_without_samples(layout, shape)
    groups = list(_groups(layout.shape, shape))
    source = layout
    if any(not g.keeps(layout) and _is_features(g, layout, shape) for g in groups):
        source = gathered_layout(layout)
    changes: dict[int, Split | None] = {d: None for d, n in enumerate(layout.shape) if n == 1}
    for group in groups:
        if not group.keeps(source):
            changes |= dict.fromkeys(group.old)
            changes[group.old[0]] = _moved(group, source)
    source = source.replace(changes=changes)
    splits: list[Split | None] = [None] * len(shape)
    for group in groups:
        split = source.splits[group.old[0]]
        if split is not None:
            points = [p * group.inner_old // group.inner_new for p in split.partition.points]
            splits[group.new[0]] = Split(split.axes, Partition(points))
    merged = [d for group in groups if len(group.old) > 1 for d in group.old]
    out = Layout(layout.mesh, shape, splits)
    return _ReshapePlan(source, out, bool(merged), bool(merged) and hides_order(source, merged))


def _plan_without_samples(layout: Layout, shape: tuple[int, ...]) -> _ReshapePlan:
    """Returns the plan of an empty tensor, split along the axes of the other groups' tensors."""
    if layout.shape.count(0) != 1 or layout.shape[0] or shape.count(0) != 1:
        return _ReshapePlan(layout.whole(), Layout(layout.mesh, shape, [None] * len(shape)))
    empty, row = shape.index(0), math.prod(layout.shape[1:])
    inner = math.prod(n for n in shape if n)
    # As if there were samples: as few as fill the new dims.
    rows = inner // math.gcd(inner, row)
    filled = tuple(n or rows * row // inner for n in shape)
    plan = _plan(_with_extent(layout, 0, rows), filled)
    return _ReshapePlan(_with_extent(plan.source, 0, 0), _with_extent(plan.out, empty, 0))


def _with_extent(layout: Layout, dim: int, extent: int) -> Layout:
    """Returns the layout with another extent of a dim, split evenly if the dim is split."""
    shape, split = list(layout.shape), layout.splits[dim]
    shape[dim] = extent
    if split is not None:
        split = Split(split.axes, Partition.even(extent, split.partition.parts))
    splits = [split if d == dim else each for d, each in enumerate(layout.splits)]
    return Layout(layout.mesh, tuple(shape), splits)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[_DimGroup]:
    olds = [d for d, n in enumerate(old) if n != 1]
    news = [d for d, n in enumerate(new) if n != 1]
    while olds:
        i = j = 1
        before, after = old[olds[0]], new[news[0]]
        while before != after:
            if before < after:
                before *= old[olds[i]]
                i += 1
            else:
                after *= new[news[j]]
                j += 1
        yield _DimGroup(olds[:i], news[:j], before // old[olds[0]], after // new[news[0]])
        olds, news = olds[i:], news[j:]


def _is_features(group: _DimGroup, layout: Layout, shape: Sequence[int]) -> bool:
    """Returns whether channels and space become the features of a linear layer.

    The next layer needs all features, so they are gathered instead of being split by channels.
    """
    lead = group.old[0]
    return (
        len(shape) > 1
        and group.new == [len(shape) - 1]
        and lead <= 1
        and layout.splits[lead] is None
    )


def _moved(group: _DimGroup, layout: Layout) -> Split | None:
    """Returns a split of the group's first dim over all ranks that split its dims.

    Points of the first dim stay, or move to the nearest multiple of the unit, and the blocks
    between them are divided further. So only ranks that share such a block exchange data.
    """
    extent, unit = layout.shape[group.old[0]], group.unit
    if extent == unit:
        return None  # can't be divided: replicated on all ranks
    first, axes = layout.splits[group.old[0]], [a for s in group.cuts(layout) for a in s.axes]
    blocks = [0, extent] if first is None else list(first.partition.points)
    blocks = [min(extent // unit, (p + unit // 2) // unit) for p in blocks]
    parts = layout.mesh.grid.size(axes) // (len(blocks) - 1)
    points = subdivide(blocks, parts).points
    return Split(tuple(axes), Partition([p * unit for p in points]))


# -- torch's calls --------------------------------------------------------------------------


@implements(torch.reshape, torch.Tensor.reshape)
def reshape(input: ShardedTensor, *shape: Any, **named: Any) -> ShardedTensor:
    """Reshapes a tensor.

    Blocks move between ranks if a rank's elements would not be one block of the result. Dims that
    become the features of a linear layer are gathered.
    """
    asked = given_as("size", shape, {("size" if n == "shape" else n): v for n, v in named.items()})
    return reshaped(input, (asked,) if isinstance(asked, int) else asked)


@implements(torch.Tensor.view)
def view(input: ShardedTensor, *shape: Any, **named: Any) -> ShardedTensor:
    """Reshapes a tensor as `reshape` does, if need be by a copy.

    torch refuses a view whose elements are in another order in memory, as of a transposed tensor.
    Shards do not show the global strides, so such a call is not refused here. If the tensor or the
    copy is then changed in place, use of the other raises an error.
    """
    dtype = named.get("dtype", shape[0] if shape else None)
    if isinstance(dtype, torch.dtype):
        if dtype.itemsize != input.dtype.itemsize:
            raise refusal(torch.Tensor.view, (input,), {}, "a view with elements of another size")
        return view_of(input, local_of(input).view(dtype), input.layout)
    asked = given_as("size", shape, named)
    return reshaped(input, (asked,) if isinstance(asked, int) else asked, is_view=True)


@implements(torch.Tensor.contiguous)
def contiguous(
    input: ShardedTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> ShardedTensor:
    """Converts each shard to a memory format."""
    local = local_of(input)
    return in_format(input, local.contiguous(memory_format=memory_format), memory_format)


@implements(torch.Tensor.reshape_as)
def reshape_as(input: Tensor, other: Tensor) -> Tensor:
    """Reshapes to the shape of another tensor."""
    return input.reshape(other.shape)


@implements(torch.Tensor.view_as)
def view_as(input: Tensor, other: Tensor) -> Tensor:
    """Views the tensor in the shape of another tensor."""
    return input.view(other.shape)


@implements(torch.flatten, torch.ravel, torch.Tensor.flatten, torch.Tensor.ravel)
def flatten(input: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> ShardedTensor:
    """Merges the dims from `start_dim` to `end_dim`."""
    start, end = canonical(start_dim, input.dim()), canonical(end_dim, input.dim())
    if start > end:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    merged = math.prod(input.shape[start : end + 1])
    return reshaped(input, (*input.shape[:start], merged, *input.shape[end + 1 :]))


@implements(torch.unflatten, torch.Tensor.unflatten)
def unflatten(input: ShardedTensor, dim: int, sizes: Sequence[int]) -> ShardedTensor:
    """Divides a dim into several."""
    d = canonical(dim, input.dim())
    return reshaped(
        input, (*input.shape[:d], *_resolve(sizes, input.shape[d : d + 1]), *input.shape[d + 1 :])
    )


@implements(torch.squeeze, torch.Tensor.squeeze)
@numpy_names
def squeeze(input: ShardedTensor, dim: int | Sequence[int] | None = None) -> ShardedTensor:
    """Removes dims of (global) extent 1."""
    asked = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d for d in canonical_all(asked, input.dim()) if input.shape[d : d + 1] == (1,)}
    layout = input.layout
    moved = redistribute(input, layout.replace(changes=dict.fromkeys(gone)))
    kept = [d for d in range(input.dim()) if d not in gone]
    out = Layout(layout.mesh, [layout.shape[d] for d in kept], [layout.splits[d] for d in kept])
    return view_of(input, local_of(moved).squeeze(tuple(gone)), out, moves(input, moved.layout))
