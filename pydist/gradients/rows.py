"""Views tensors as rows of elements, in the order of memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill one interval of memory without overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def memory_of(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's elements as one row, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(row: Tensor, parameter: Tensor) -> Tensor:
    """Returns a row in a parameter's memory order, in its shape; in index order if it has gaps."""
    if is_dense(parameter):
        return row.as_strided(parameter.shape, parameter.stride())
    return row.view(parameter.shape)


def in_memory_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor's elements as one row, in the order of a dense parameter's memory."""
    if not in_order_of(tensor, parameter):
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return memory_of(tensor)


def in_order_of(tensor: Tensor, parameter: Tensor) -> bool:
    """Returns whether a tensor has the memory order of a parameter, without gaps."""
    return is_dense(tensor) and (
        tensor.stride() == parameter.stride()
        or (tensor.is_contiguous() and parameter.is_contiguous())
    )
