"""`x.new_zeros(...)` and similar calls: a tensor of the shape of `x` has its layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.tensor import HANDLERS, ShardedTensor, local_of, wrap


def _creator(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def handler(x: ShardedTensor, *size: Any, **options: Any) -> Tensor:
        """Makes a tensor: sharded if it has the shape of `x`, else plain and whole on all ranks."""
        asked = options.pop("size", None)
        if asked is None:
            asked = size[0] if isinstance(size[0], (tuple, list)) else size
            size = size[1:] if isinstance(size[0], (tuple, list)) else ()
        shape = tuple(asked)
        layout = x.layout
        # `nn.init.orthogonal_` decomposes an empty tensor, of the shape of a weight or of another.
        is_plain = func is torch.Tensor.new_empty and x._origin.sizes.of_weight
        if is_plain or shape != layout.shape:
            return func(local_of(x), shape, *size, **options)
        return wrap(func(local_of(x), layout.local_shape, *size, **options), layout, x)

    return handler


for _func in (
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_full,
    torch.Tensor.new_empty,
):
    HANDLERS[_func] = _creator(_func)


def _new_tensor(x: ShardedTensor, data: Any, **options: Any) -> Tensor:
    """Returns a plain tensor of given values, with the dtype and device of `x`."""
    return local_of(x).new_tensor(data, **options)


HANDLERS[torch.Tensor.new_tensor] = _new_tensor
