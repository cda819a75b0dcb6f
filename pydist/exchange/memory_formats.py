"""The memory format of shards, which all ranks of a group must share to exchange them."""

from __future__ import annotations

import torch
from torch import Tensor

from pydist.mesh import Mesh


def is_channels_last(x: Tensor) -> bool:
    """Returns whether a tensor is channels-last, and not plain as well."""
    return not x.is_contiguous() and x.permute(0, *range(2, x.dim()), 1).is_contiguous()


def all_channels_last(local: Tensor, mesh: Mesh, weight: Tensor | None = None) -> bool:
    """Returns whether all non-empty shards of the sample group are channels-last.

    Collective over the group; plans call this once, when they are made.

    Args:
        local: this rank's shard.
        mesh: the mesh.
        weight: of a convolution of the shards; a channels-last weight suffices.
    """
    if local.dim() < 3:
        return False
    wants_last = is_channels_last(local) or (weight is not None and is_channels_last(weight))
    votes = torch.tensor([int(wants_last), int(local.numel() > 0)])
    votes = mesh.sample.all_gather(votes)
    return bool(votes[:, 0].any()) and bool((votes[:, 0] >= votes[:, 1]).all())
