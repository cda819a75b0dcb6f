"""Shards without elements, on which some of torch's calls lose the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def with_elements(local: Tensor) -> Tensor:
    """A shard; an empty one with one zero more along each of its empty dims.

    Where the backward of a call has no graph for tensors of nothing, a rank that holds nothing
    would miss exchanges of the others in second order.
    """
    if local.numel():
        return local
    return F.pad(local, [int(n == 0 and end) for n in reversed(local.shape) for end in (0, 1)])


def without_added(result: Tensor, shape: Sequence[int]) -> Tensor:
    """Cuts off what `with_elements` added; the result has `shape`, and is no view."""
    if tuple(result.shape) == tuple(shape):
        return result
    return result[tuple(slice(n) for n in shape)].clone()
