"""Checks arguments of the public operations, with one-line error messages."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from pydist.comm.interface.reduction import ReduceOp
from pydist.errors import UsageError

_REDUCE_OPS = get_args(ReduceOp)

_DTYPES = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    }
)  # fmt: skip


def check_elements(call: str, tensor: Tensor, *, strided: bool = False) -> None:
    """Refuses dtypes that can't be sent and, unless `strided`, non-contiguous tensors."""
    if not strided and not tensor.is_contiguous():
        raise UsageError(
            f"{call}: tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            " is not contiguous"
        )
    if tensor.dtype not in _DTYPES:
        raise UsageError(f"{call}: dtype {tensor.dtype} can't be sent")


def check_like(call: str, given: Tensor, wanted: Tensor) -> None:
    """Refuses a tensor whose dtype or number of elements differs.

    Args:
        call: name of the operation, for the error.
        given: the tensor that was passed.
        wanted: a tensor with the dtype and the number of elements that fit.
    """
    if given.numel() != wanted.numel() or given.dtype != wanted.dtype:
        raise UsageError(
            f"{call}: {given.dtype} of shape {tuple(given.shape)} does not match"
            f" {wanted.dtype} of shape {tuple(wanted.shape)}"
        )


def check_op(op: str, tensor: Tensor) -> None:
    """Refuses operations that `ReduceOp` does not name, and the order of complex numbers."""
    if op not in _REDUCE_OPS:
        raise UsageError(f"all_reduce: op '{op}' is none of {', '.join(_REDUCE_OPS)}")
    if tensor.is_complex() and op != "sum":
        raise UsageError(f"all_reduce: the {op} of {tensor.dtype}; complex numbers can be summed")


def real_view(tensor: Tensor) -> Tensor:
    """Returns the real and imaginary parts of a complex tensor, as a view; others unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_peer(rank: int, size: int) -> None:
    """Refuses ranks outside a group of `size` ranks."""
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is outside the group of {size} ranks")


def check_tag(tag: int) -> None:
    """Refuses tags that some libraries don't support."""
    # The MPI standard guarantees tags up to 32767 only.
    if not 0 <= tag < 1 << 15:
        raise UsageError(f"tag {tag} is outside [0, {1 << 15})")
