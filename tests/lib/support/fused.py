"""Calls that tests of deferred and fused layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist import layout_for_sample
from support.equivalence import on_ranks, shard

FORMATS = [torch.contiguous_format, torch.channels_last_3d]

# The input is a product: a norm is deferred only if no other tensor shares its input's memory.
NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "batch": lambda x, w, b: F.batch_norm(x * 1.0, None, None, w, b, training=True),
    "instance": lambda x, w, b: F.instance_norm(x * 1.0, None, None, w, b),
    "group": lambda x, w, b: F.group_norm(x * 1.0, 2, w, b),
}


def with_relu(y: Tensor, slope: float) -> Tensor:
    """Applies a ReLU in place; a leaky one unless the slope is zero."""
    return F.relu(y, inplace=True) if slope == 0 else F.leaky_relu(y, slope, inplace=True)


def ranks_see(function: Callable[[Any], Any], x: Tensor) -> Any:
    """Returns the result of `function(part)` on one of two ranks."""
    return on_ranks((2, 1, 1), lambda mesh: function(shard(x, layout_for_sample(mesh, x.shape))))[0]
