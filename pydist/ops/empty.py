"""Forms of torch calls that keep the autograd graph of empty shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def with_elements(local: Tensor) -> Tensor:
    """Returns the shard, padded with one zero along each of its empty dims.

    Where the backward of a call has no graph for empty tensors, a rank with an empty shard would
    miss exchanges of the other ranks in double backward.
    """
    if local.numel():
        return local
    return F.pad(local, [int(n == 0 and end) for n in reversed(local.shape) for end in (0, 1)])


def without_added(result: Tensor, shape: Sequence[int]) -> Tensor:
    """Removes the padding of `with_elements`; the result has `shape` and is not a view."""
    if tuple(result.shape) == tuple(shape):
        return result
    return result[tuple(slice(n) for n in shape)].clone()


def cat_shards(parts: list[Tensor] | tuple[Tensor, ...], dim: int) -> Tensor:
    """Computes `torch.cat(parts, dim)`, also of empty vectors."""
    if parts[0].dim() > 1:
        return torch.cat(parts, dim)
    # torch.cat's backward has no graph for an empty vector, so ranks would diverge.
    return torch.cat([part.unsqueeze(1) for part in parts]).squeeze(1)
