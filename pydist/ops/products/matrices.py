"""Computes determinants and inverses of matrices, as of affine maps and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.ops.reduction.reduce import result_of
from pydist.ops.transposition import along_dims, whole_along
from pydist.tensor import ShardedTensor, implements, local_of
from pydist.tensor.operands import redistribute


def _of_matrices(func: Callable[..., Any], x: ShardedTensor) -> Any:
    """Computes matrices or numbers of the matrices in the last two dims, each on one rank."""
    meta = func(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # torch's checks and messages
    numbers = (meta if isinstance(meta, Tensor) else meta[0]).shape != x.shape
    dims = x.dim() - 2, x.dim() - 1
    added = 0 in whole_along(x.layout, dims).local_shape

    def call(local: Tensor) -> Any:
        if added:  # zeros, which have no inverse
            local = local + torch.eye(local.shape[-1], dtype=local.dtype, device=local.device)
        found = func(local)
        if not numbers:
            return found
        if isinstance(found, Tensor):
            return found[..., None, None]
        return type(found)([part[..., None, None] for part in found])

    def without(kept: ShardedTensor) -> Any:
        whole = redistribute(kept, kept.layout.replace(changes=dict.fromkeys(dims)))
        return result_of(local_of(whole).squeeze(-1).squeeze(-1), whole, dims, False)

    kept = along_dims(call, x, dims)
    if not numbers:
        return kept
    return without(kept) if isinstance(kept, ShardedTensor) else type(kept)(map(without, kept))


def _register(func: Callable[..., Any], *others: Callable[..., Any]) -> None:
    @implements(func, *others)
    def handler(A: ShardedTensor) -> Any:
        return _of_matrices(func, A)


_register(torch.linalg.det, torch.det, torch.Tensor.det)
_register(torch.linalg.slogdet)
_register(torch.slogdet, torch.Tensor.slogdet)
_register(torch.logdet, torch.Tensor.logdet)
_register(torch.linalg.inv, torch.inverse, torch.Tensor.inverse)
