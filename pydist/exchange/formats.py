"""The memory format of shards, which the ranks of a group have to choose alike to exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from pydist.mesh import Mesh


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels vary fastest, and the tensor is not plain as well."""
    return not x.is_contiguous() and x.permute(0, *range(2, x.dim()), 1).is_contiguous()


def all_channels_last(local: Tensor, mesh: Mesh, weight: Tensor | None = None) -> bool:
    """Whether the shards of all ranks of the sample group lie so, those without elements aside.

    An exchange of the group: plans ask when they are made, and stay with the answer.

    Args:
        local: this rank's shard.
        mesh: the mesh.
        weight: of a convolution of the shards; if it lies so, that is enough.
    """
    if local.dim() < 3:
        return False
    lies = is_channels_last(local) or (weight is not None and is_channels_last(weight))
    votes = torch.tensor([int(lies), int(local.numel() > 0)])
    votes = mesh.sample.all_gather(votes)
    return bool(votes[:, 0].any()) and bool((votes[:, 0] >= votes[:, 1]).all())
