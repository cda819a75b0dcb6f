"""Initialization of sharded weights: the slice of what one device would draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pydist.exchange.own_slice import is_sharded_weight
from pydist.slices.state import own_part
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal

_CALLS = (
    nn.init.constant_,
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    Tensor.uniform_,  # as the others draw
    Tensor.normal_,
)


def install() -> None:
    """Lets the functions of `torch.nn.init` set sharded weights."""
    for each in _CALLS:
        HANDLERS[each] = partial(_initialize, each)


def _initialize(
    func: Callable[..., Tensor], tensor: ShardedTensor, *args: Any, **kwargs: Any
) -> ShardedTensor:
    """Draws the whole weight from torch's generator, as all ranks do, and keeps the slice."""
    if not is_sharded_weight(tensor):
        why = "it is no weight; torch.rand_like and torch.randn_like draw for all ranks"
        raise refusal(func, (tensor,), {}, why)
    own = local_of(tensor)
    whole = torch.empty(tensor.layout.shape, dtype=own.dtype, device=own.device)
    func(whole, *args, **kwargs)
    with torch.no_grad():
        own.copy_(own_part(whole, tensor.layout))
    return tensor
