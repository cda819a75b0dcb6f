"""Initializes sharded weights: each rank keeps its slice of what one device would draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal


def _initialize(
    func: Callable[..., Tensor], tensor: ShardedTensor, *args: Any, **kwargs: Any
) -> ShardedTensor:
    """Draws the whole weight from torch's generator, as all ranks do, and keeps the slice."""
    if not tensor._origin.sizes.of_weight:  # as the weight, `weight.data` and their parts are
        why = "it is no weight; torch.rand_like and torch.randn_like draw for all ranks"
        raise refusal(func, (tensor,), {}, why)
    own = local_of(tensor)
    whole = torch.empty(tensor.layout.shape, dtype=own.dtype, device=own.device)
    func(whole, *args, **kwargs)
    with torch.no_grad():
        own.copy_(whole[tensor.layout.box.slices])
    return tensor


for _call in (
    nn.init.constant_,
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    Tensor.uniform_,  # as the others of nn.init draw
    Tensor.normal_,
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.log_normal_,
    Tensor.cauchy_,
    Tensor.random_,
):
    HANDLERS[_call] = partial(_initialize, _call)
