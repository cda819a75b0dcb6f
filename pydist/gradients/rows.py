"""Tensors as rows of elements, in the order in which these lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one interval of memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def memory_of(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as one row, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(row: Tensor, parameter: Tensor) -> Tensor:
    """A row in the order of a parameter's memory, in its shape; in index order if it has gaps."""
    if is_dense(parameter):
        return row.as_strided(parameter.shape, parameter.stride())
    return row.view(parameter.shape)


def in_memory_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The elements of a tensor as one row, in the order of a dense parameter's memory."""
    if not in_order_of(tensor, parameter):
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return memory_of(tensor)


def in_order_of(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether the elements of a tensor lie in memory as those of a parameter do, without gaps."""
    return is_dense(tensor) and (
        tensor.stride() == parameter.stride()
        or (tensor.is_contiguous() and parameter.is_contiguous())
    )
