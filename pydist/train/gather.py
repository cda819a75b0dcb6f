"""Whole tensors of one rank, for files and pictures: from the others' blocks, and into them.

Only the first rank of a sample group takes memory for the whole, and nothing is kept for the next
time: volumes of many shapes may pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pydist.layout import Layout
from pydist.partition import Box
from pydist.tensor import ShardedTensor


def on_first_rank(x: ShardedTensor) -> Tensor | None:
    """The whole tensor on the first rank of each sample group, None on the others. Collective."""
    group, layout = x.mesh.sample, x.layout
    local = x.to_local().detach().contiguous()
    if group.rank != 0:
        if local.numel():
            group.send(local, 0)
        return None
    whole = torch.empty(layout.shape, dtype=local.dtype)
    for rank, box in enumerate(layout.boxes):
        if box.empty:
            continue
        if rank == 0:
            block = local
        else:
            block = torch.empty(tuple(box.shape), dtype=local.dtype)
            group.recv(block, rank)
        whole[_slices(box)] = block
    return whole


def from_first_rank(whole: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor:
    """This rank's block of a tensor that the first rank of the sample group has. Collective.

    Args:
        whole: on the first rank the tensor, of the shape of `layout`; None on the others.
        layout: where the blocks lie.
        dtype: of the tensor.
    """
    group = layout.mesh.sample
    if whole is None:
        local = torch.empty(layout.local_shape, dtype=dtype)
        if local.numel():
            group.recv(local, 0)
        return local
    for rank, box in enumerate(layout.boxes):
        if rank != 0 and not box.empty:
            group.send(whole[_slices(box)].contiguous(), rank)
    return whole[_slices(layout.box)].contiguous()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))
