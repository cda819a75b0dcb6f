"""Results that torch gives as views: here they share memory, or are copies that know their base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.aliasing import Part, View, view_at
from pydist.layout import Layout
from pydist.tensor import ShardedTensor, wrap


def view_of(
    x: ShardedTensor,
    local: Tensor,
    layout: Layout,
    is_copy: bool = False,
    part: Part | None = None,
    index: Sequence[Any] | None = None,
    is_expanded: bool = False,
) -> ShardedTensor:
    """A result of `x` that is a view in torch, or may be one.

    Args:
        x: the tensor.
        local: the result's shard.
        layout: of the result.
        is_copy: whether changes of one are not to be seen in the other. Equal on all ranks, so it
            follows from layouts; then, if one is changed in place, use of the other is refused.
        part: a box of `x` that contains the result.
        index: of the result in `x`.
        is_expanded: whether elements are repeated without a copy.
    """
    y = wrap(local, layout, x)
    if x.mesh.sample_size == 1:
        is_copy = False
        if not shares_memory(local, x._shard):
            return y  # a copy in torch as well
    if 0 not in layout.shape:
        view = view_at(x)
        memory = view.memory.copied(x._shard) if is_copy else view.memory
        cut = None if index is None else (view, index)
        is_expanded = is_expanded or (view.is_expanded and not is_copy)
        y._view = View(memory, view.part or part, cut, is_expanded)
    return y


def moves(x: ShardedTensor, layout: Layout) -> bool:
    """Whether ranks exchange blocks to bring `x` to a layout of the same shape."""
    return x._layout != layout and x._layout.boxes != layout.boxes


def hides_order(layout: Layout, dims: Sequence[int]) -> bool:
    """Whether a rank's shard does not show in which order these dims are stored in the whole.

    Dims of extent 0 or 1 have no order. Such a shard can be reshaped as a view, or be contiguous,
    though the whole tensor can't.
    """

    def find() -> bool:
        return any(
            box.empty or any(box.shape[d] < 2 <= layout.shape[d] for d in dims)
            for box in layout.boxes
        )

    return layout.mesh.session.plan(("hides order", layout, tuple(dims)), find)


def in_format(
    input: ShardedTensor, local: Tensor, memory_format: torch.memory_format
) -> ShardedTensor:
    """The tensor with its shard brought to a memory format.

    In torch it is the tensor itself or a copy, by the strides of the whole, which shards may not
    show.
    """
    layout, is_same = input._layout, local is input._shard
    if is_same and input.mesh.sample_size == 1:
        return input
    is_plain = memory_format == torch.contiguous_format
    if is_same and is_plain and hides_order(layout, range(input.dim())):
        local = local.clone()  # in torch it may be a copy, which may be changed though x is saved
    return view_of(input, local, layout, is_copy=True)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether a result of a call is a view of its argument."""
    return _address(one) == _address(other)


def _address(local: Tensor) -> int:
    return local.untyped_storage().data_ptr()
