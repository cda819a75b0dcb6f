"""Assigns values to a part of a tensor, split or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.layout import Layout, Split
from pydist.ops.pointwise.elementwise import elementwise
from pydist.ops.pointwise.in_place import in_place_on_plain
from pydist.ops.shaping.indexing import (
    entries_of,
    layout_of_indices,
    require_mask_shape,
    selected_layout,
    without_masks,
)
from pydist.ops.shaping.slicing import region_of
from pydist.ops.transposition import whole_along
from pydist.tensor import ShardedTensor, implements, local_of, replace_shard_, wrap
from pydist.tensor.aliasing import is_view_at, written_back
from pydist.tensor.operands import operand_for, operand_in, redistribute, refuse_shard_shaped
from pydist.tensor.sharded import whole_of

_SET = torch.Tensor.__setitem__


@implements(_SET)
def setitem(x: Tensor, index: Any, value: Any) -> None:
    """Assigns numbers or (plain or sharded) tensors to the elements that an index selects.

    A plain tensor to which a sharded one is assigned becomes sharded, with the same splits.
    """
    if isinstance(index, Tensor) and index.dtype == torch.bool and _is_number(value):
        require_mask_shape(x, index)
        mask = index.reshape((*index.shape, *[1] * (x.dim() - index.dim())))
        elementwise(torch.Tensor.masked_fill_, x, mask, value)
        return
    entries = entries_of(x, index)
    assign = _assign_at if any(isinstance(e, Tensor) for e in entries) else _assign
    if isinstance(x, ShardedTensor):
        assign(_SET, x, entries, value)
    elif not isinstance(value, ShardedTensor):
        x[tuple(whole_of(e) for e in entries)] = value  # all ranks write all of it
    elif assign is _assign:
        layout = _layout_around(value, entries, x)
        in_place_on_plain(_assign, _SET, (x, entries, value), {}, layout)
    else:
        whole = Layout(value.mesh, tuple(x.shape), [None] * x.dim())
        in_place_on_plain(_assign_at, _SET, (x, entries, value), {}, whole)


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (
        value.dim() == 0 and not isinstance(value, ShardedTensor)
    )


def _assign(
    func: Callable[..., Any], x: ShardedTensor, entries: Sequence[Any], value: Any
) -> ShardedTensor:
    region = region_of(x.layout, entries)
    if is_view_at(value, x, entries):
        return replace_shard_(x, local_of(x))  # x[index] += 1 has already written the value
    written = written_back(x, value, entries)
    if isinstance(value, Tensor):
        value = _part_of(value, x.dtype, region.layout, region.removed)
    local = local_of(x)
    # Through a view: if the selection covers the block, torch would omit the old values from the
    # graph, and this rank's double backward would lack exchanges of the other ranks.
    local.view_as(local)[region.local] = value
    replace_shard_(x, local)
    if written is not None and written.storage is not None:
        written.born = written.storage.clock
    return x


def _assign_at(
    func: Callable[..., Any], x: ShardedTensor, entries: Sequence[Any], value: Any
) -> ShardedTensor:
    """Assigns at tensors of indices; each rank gathers the dims that are not assigned in full."""
    basic, indices = without_masks(x, entries, x.layout)
    work = whole_along(x.layout, _partly_assigned(basic, indices))
    region = region_of(work, basic)
    left = [d for d in range(len(region.layout.shape)) if d not in region.removed]
    shape = [region.layout.shape[d] for d in left]
    basic_layout = Layout(x.mesh, shape, [region.layout.splits[d] for d in left])
    common = layout_of_indices(indices.values(), work).whole()
    selected = selected_layout(basic_layout, indices, common)
    own = {
        d: operand_in(i, Layout(x.mesh, tuple(i.shape), [None] * i.dim()), work)
        for d, i in indices.items()
    }
    if isinstance(value, Tensor):
        extra = max(0, value.dim() - len(selected.shape))
        value = value.reshape(value.shape[extra:]) if extra else value
        value = operand_for(value.to(x.dtype), selected, selected.shape)
    local = local_of(redistribute(x, work)).clone()
    local[tuple(basic)][tuple(own.get(d, slice(None)) for d in range(len(shape)))] = value
    result = redistribute(wrap(local, work, x), x.layout)
    return elementwise(torch.Tensor.copy_, x, result)


def _partly_assigned(basic: Sequence[Any], indices: Mapping[int, Tensor]) -> list[int]:
    """Returns the dims in which not all elements are assigned, or not in order.

    Args:
        basic: of the index, with full slices for tensors of indices.
        indices: by dim of the selection.
    """
    found = []
    dim = at = 0
    for entry in basic:
        if entry is not None:
            if entry != slice(None) or at in indices:
                found.append(dim)
            dim += 1
        at += not isinstance(entry, int)
    return found


def _part_of(value: Tensor, dtype: torch.dtype, layout: Layout, removed: Sequence[int]) -> Tensor:
    """Returns this rank's part of a value that is assigned to a selection.

    Args:
        value: broadcastable to the selection without the dims that integers remove.
        dtype: of the tensor to which the value is assigned.
        layout: of the selection, including the removed dims.
        removed: dims that integers remove.
    """
    shape = [n for d, n in enumerate(layout.shape) if d not in removed]
    extra = value.dim() - len(shape)
    if extra > 0 and all(n == 1 for n in value.shape[:extra]):
        value = value.reshape(value.shape[extra:])
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    if value.dim() > len(shape) or any(n not in (1, m) for n, m in pairs):
        if not isinstance(value, ShardedTensor):
            refuse_shard_shaped(value, layout)
        raise RuntimeError(
            f"a tensor of shape {list(value.shape)} can't be assigned to a part of shape {shape}"
        )
    for d in reversed(removed):
        behind = len(layout.shape) - 1 - d
        if value.dim() >= behind:
            value = value.unsqueeze(-1 - behind)
    return operand_for(value.to(dtype), layout, layout.shape)


def _layout_around(value: ShardedTensor, entries: Sequence[Any], x: Tensor) -> Layout:
    """Returns the layout of a tensor into which `value` is written, split in its full dims."""
    splits: list[Split | None] = [None] * x.dim()
    dim, at = x.dim(), value.dim()
    for entry in reversed(entries):
        dim -= entry is not None
        at -= not isinstance(entry, int)
        if isinstance(entry, slice) and at >= 0 and value.shape[at] == x.shape[dim]:
            splits[dim] = value.layout.splits[at]
    return Layout(value.mesh, tuple(x.shape), splits)
