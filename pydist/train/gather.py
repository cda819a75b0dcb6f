"""Gathers sharded tensors on one rank, and scatters them from there, for files and figures.

Only the first rank of a sample group allocates the full tensor, and no plans are cached, as volumes
may have many shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pydist.layout import Layout
from pydist.tensor import ShardedTensor


def gather_to_first_rank(x: ShardedTensor) -> Tensor | None:
    """Gathers the full tensor on each sample group's first rank; None on others. Collective."""
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
        whole[box.slices] = block
    return whole


def scatter_from_first_rank(whole: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Scatters a tensor from the first rank of the sample group; returns the block. Collective.

    Args:
        whole: on the first rank the tensor, of the shape of `layout`; None on the others.
        layout: the layout of the blocks.
        dtype: dtype of the tensor.
    """
    group = layout.mesh.sample
    if whole is None:
        local = torch.empty(layout.local_shape, dtype=dtype)
        if local.numel():
            group.recv(local, 0)
        return local
    for rank, box in enumerate(layout.boxes):
        if rank != 0 and not box.empty:
            group.send(whole[box.slices].contiguous(), rank)
    return whole[layout.box.slices].contiguous()
