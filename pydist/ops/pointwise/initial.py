"""Initializes sharded weights: each rank keeps its slice of what one device would draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pydist.exchange.own_slice import is_sharded_weight
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _initialize(
    func: Callable[..., Tensor], tensor: Any, *args: Any, **kwargs: Any
) -> ShardedTensor:
    """Draws the whole weight from torch's generator, as all ranks do, and keeps the slice."""
    given = (*args, *kwargs.values())
    if not isinstance(tensor, ShardedTensor) or any(isinstance(x, ShardedTensor) for x in given):
        raise refusal(func, (tensor, *args), kwargs, "its arguments are sharded")
    if not tensor._origin.sizes.of_weight:  # as the weight and `weight.data` are
        why = "it is no weight; torch.rand_like and torch.randn_like draw for all ranks"
        raise refusal(func, (tensor,), {}, why)
    own = local_of(tensor)
    order = torch.contiguous_format
    # One channel is contiguous in both formats, but its stride is that of its format.
    if own.dim() in _CHANNELS_LAST and own.stride(1) <= own.stride(-1):
        order = _CHANNELS_LAST[own.dim()]
    is_all = is_sharded_weight(tensor) or own.nbytes == own.untyped_storage().nbytes()
    if not is_all or not own.is_contiguous(memory_format=order):
        # torch draws in the order of the memory, which the ranks' parts do not tell.
        raise refusal(func, (tensor,), {}, "it is a view of a part of a weight; draw all of it")
    shape = tensor.layout.shape
    whole = torch.empty(shape, dtype=own.dtype, device=own.device, memory_format=order)
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
