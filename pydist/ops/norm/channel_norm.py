"""Normalizes each voxel over neighboring channels: local response norm."""

from __future__ import annotations

import torch.nn.functional as F

from pydist.ops.channels import with_channels
from pydist.ops.empty import with_elements, without_added
from pydist.tensor import ShardedTensor, implements, local_of, wrap


@implements(F.local_response_norm)
def local_response_norm(
    input: ShardedTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> ShardedTensor:
    """Applies local response norm, with the squares of `size` neighboring channels."""
    input = with_channels(input, None) if input.dim() > 1 else input
    layout = input.layout
    # torch merges the last dims of [N, C, D, H, W] in a view, which other formats do not allow.
    local = with_elements(local_of(input).contiguous())
    normed = F.local_response_norm(local, size, alpha, beta, k)
    return wrap(without_added(normed, layout.local_shape), layout, input)
