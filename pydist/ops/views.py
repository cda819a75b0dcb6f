"""Helpers for views of sharded tensors: whether blocks move, and the memory order of dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pydist.layout import Layout
from pydist.tensor import ShardedTensor, view_of


def moves(x: ShardedTensor, layout: Layout) -> bool:
    """Returns whether ranks exchange blocks to bring `x` to a layout of the same shape."""
    return x.layout != layout and x.layout.boxes != layout.boxes


def hides_order(layout: Layout, dims: Sequence[int]) -> bool:
    """Returns whether some shard does not show the order in memory of the global tensor's dims.

    Dims of extent 0 or 1 have no order. Such a shard can be contiguous, or reshaped as a view,
    though the global tensor can't.
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
    """Returns the tensor with its shard in a memory format.

    torch returns the tensor itself or a copy, depending on the global strides, which shards may
    not show.
    """
    layout, is_same = input.layout, local is input._shard
    if is_same and input.mesh.sample_size == 1:
        return input
    is_plain = memory_format == torch.contiguous_format
    if is_same and is_plain and hides_order(layout, range(input.dim())):
        local = local.clone()  # torch may return a copy, which may change while x is saved
    return view_of(input, local, layout, is_copy=True)
