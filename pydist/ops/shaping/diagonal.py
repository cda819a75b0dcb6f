"""Reads diagonals, whose two dims are gathered."""

from __future__ import annotations

import torch

from pydist.layout import Layout
from pydist.ops.dims import canonical_all
from pydist.ops.dtypes import result_dtype
from pydist.ops.views import moves
from pydist.tensor import ShardedTensor, implements, local_of, refusal, view_of
from pydist.tensor.operands import redistribute


@implements(torch.diagonal, torch.Tensor.diagonal)
def diagonal(input: ShardedTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardedTensor:
    """Reads the diagonal of two dims, which becomes the last dim."""
    first, second = canonical_all((dim1, dim2), input.dim())
    whole = redistribute(input, input.layout.replace(changes={first: None, second: None}))
    local = local_of(whole).diagonal(offset, first, second)
    old = whole.layout
    kept = [d for d in range(input.dim()) if d not in (first, second)]
    layout = Layout(
        old.mesh,
        (*(old.shape[d] for d in kept), local.shape[-1]),
        (*(old.splits[d] for d in kept), None),
    )
    return view_of(input, local, layout, moves(input, old))


@implements(torch.diag, torch.Tensor.diag)
def diag(input: ShardedTensor, diagonal: int = 0) -> torch.Tensor:
    """Returns a copy of a matrix's diagonal."""
    if input.dim() != 2:
        raise refusal(torch.diag, (input,), {}, "it is no matrix")
    return input.diagonal(diagonal).clone()


@implements(torch.trace, torch.Tensor.trace)
def trace(input: ShardedTensor) -> torch.Tensor:
    """Computes the sum of a matrix's diagonal."""
    if input.dim() != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {input.dim()}")
    # On a device, autocast has a rule for the sum and none for the trace.
    return input.diagonal().sum().to(result_dtype(torch.trace, ((1, 1), input)))
