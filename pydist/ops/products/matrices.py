"""Computes determinants and inverses of matrices, as of affine maps and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.ops.reduction.reduce import result_of
from pydist.ops.transposition import along_dims, whole_along
from pydist.tensor import ShardedTensor, implements, local_of
from pydist.tensor.operands import redistribute


def _of_matrices(
    func: Callable[..., Any], x: ShardedTensor, compute: Callable[..., Any] | None = None
) -> Any:
    """Computes matrices or numbers of the matrices in the last two dims, each on one rank.

    Args:
        func: the call.
        x: the matrices.
        compute: the same as `func` on one rank, by default `func` itself.
    """
    meta = func(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # torch's checks and messages
    numbers = (meta if isinstance(meta, Tensor) else meta[0]).shape != x.shape
    dims = x.dim() - 2, x.dim() - 1
    added = 0 in whole_along(x.layout, dims).local_shape

    def call(local: Tensor) -> Any:
        if added:  # zeros, which have no inverse
            local = local + torch.eye(local.shape[-1], dtype=local.dtype, device=local.device)
        found = (compute or func)(local)
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


def _inverse(x: ShardedTensor) -> Any:
    """Computes inverses; an error of one rank's matrices is one of all ranks."""

    def compute(local: Tensor) -> Tensor:
        found, info = torch.linalg.inv_ex(local)
        is_singular = torch.tensor([bool(info.any())])
        x.mesh.sample.all_reduce(is_singular)
        if is_singular:
            raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]  # not in its stubs
                "linalg.inv: an input matrix is singular"
            )
        return found

    return _of_matrices(torch.linalg.inv, x, compute)


def _register(compute: Callable[[ShardedTensor], Any], *funcs: Callable[..., Any]) -> None:
    @implements(*(func for func in funcs if func.__name__.startswith("linalg")))
    def of_linalg(A: ShardedTensor) -> Any:
        return compute(A)

    @implements(*(func for func in funcs if not func.__name__.startswith("linalg")))
    def other(input: ShardedTensor) -> Any:
        return compute(input)


_register(partial(_of_matrices, torch.linalg.det), torch.linalg.det, torch.det, torch.Tensor.det)
_register(partial(_of_matrices, torch.linalg.slogdet), torch.linalg.slogdet)
_register(partial(_of_matrices, torch.slogdet), torch.slogdet, torch.Tensor.slogdet)
_register(partial(_of_matrices, torch.logdet), torch.logdet, torch.Tensor.logdet)
_register(_inverse, torch.linalg.inv, torch.inverse, torch.Tensor.inverse)
