"""Computes norms, products and log-sum-exp over any dims, and distances."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.comm.interface.reduction import WIDER
from pydist.exchange.adjoints import all_reduce_sum
from pydist.mesh import Mesh
from pydist.ops.dims import canonical, numpy_names
from pydist.ops.dtypes import result_dtype
from pydist.ops.pointwise.elementwise import broadcast_layout, elementwise
from pydist.ops.reduction.extremes import reduce_amax, reduce_amin
from pydist.ops.reduction.reduce import (
    Dims,
    axes_of,
    in_full_precision,
    is_local,
    reduce_sum,
    reduced_dims,
    result_of,
)
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap
from pydist.tensor.operands import operand_for


def reduce_norm(
    x: ShardedTensor,
    p: float,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Computes the p-norm over dims; over split dims for p >= 0 and -inf only."""
    dims = reduced_dims(x, dim)
    if is_local(x, dims):
        norm = torch.linalg.vector_norm(local_of(x), p, dims, keepdim, dtype=dtype)
        return result_of(norm, x, dims, keepdim)
    rounded = None if dtype else in_full_precision(torch.linalg.vector_norm, x)
    if dtype or rounded:
        x = x.to(dtype or WIDER[x.dtype])  # type: ignore[assignment]
    norm = _norm(x, p, dims, keepdim)
    return norm.to(rounded) if rounded else norm


def _norm(x: ShardedTensor, p: float, dims: tuple[int, ...], keepdim: bool) -> Any:
    if p in (math.inf, -math.inf):
        extreme = reduce_amax if p > 0 else reduce_amin
        return extreme(elementwise(torch.abs, x), dims, keepdim)
    if p < 0:
        raise refusal(torch.linalg.vector_norm, (x,), {}, f"order {p} over a split dim")
    if p == 1:
        return reduce_sum(elementwise(torch.abs, x), dims, keepdim)
    # Powers and roots have no gradient at 0, where torch defines the norm's gradient as 0.
    if p == 2:
        squares = (x * x.conj()).real if x.is_complex() else elementwise(torch.mul, x, x)
        total = reduce_sum(squares, dims, keepdim)  # type: ignore[arg-type]
    else:
        nothing = x == 0
        powers = x.masked_fill(nothing, 1).abs() ** p
        total = reduce_sum(powers.masked_fill(nothing, 0), dims, keepdim)  # type: ignore[arg-type]
    if p == 0:
        return total  # counted as powers, for torch's gradient: zeros
    zero = total == 0
    safe = torch.where(zero, 1, total)
    return torch.where(zero, 0, safe.sqrt() if p == 2 else safe ** (1 / p))


@implements(torch.norm, torch.Tensor.norm)
@numpy_names
def norm(
    input: ShardedTensor,
    p: Any = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Computes torch.norm as a vector norm over any number of dims."""
    if p == "nuc" or out is not None:
        why = "the nuclear norm" if out is None else "out= would fill only this rank's block"
        raise refusal(torch.norm, (input,), {}, why)
    return reduce_norm(input, 2 if p in (None, "fro") else p, dim, keepdim, dtype)


@implements(torch.linalg.vector_norm)
@numpy_names
def vector_norm(
    x: ShardedTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Computes torch.linalg.vector_norm."""
    return reduce_norm(x, ord, dim, keepdim, dtype)


@implements(torch.linalg.norm)
@numpy_names
def linalg_norm(
    A: ShardedTensor,
    ord: Any = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Computes torch.linalg.norm, if it is a vector norm."""
    if ord is not None and len(reduced_dims(A, dim)) != 1:
        raise refusal(torch.linalg.norm, (A,), {}, "a matrix norm")
    return reduce_norm(A, 2 if ord is None else ord, dim, keepdim, dtype)


def _parts(partial: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Gathers the tensors of the ranks along `axes`, stacked in rank order; differentiable."""
    group = mesh.group(axes)
    mine = torch.arange(group.size, device=partial.device) == group.rank
    placed = torch.where(mine.view(-1, *(1 for _ in partial.shape)), partial, 0)
    return all_reduce_sum(placed, mesh, axes)


@implements(torch.prod, torch.Tensor.prod)
@numpy_names
def prod(
    input: ShardedTensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Computes the product over one dim or all elements."""
    dims = reduced_dims(input, dim)
    if dim is not None and all(input.shape[d] == 1 for d in dims):
        return reduce_sum(input, dims, keepdim, dtype)
    alone = is_local(input, dims)
    rounded = None if alone or dtype else in_full_precision(torch.prod, input)
    own = _local_product(input, dim, keepdim, WIDER[input.dtype] if rounded else dtype)
    if alone:
        return result_of(own, input, dims, keepdim)
    total = _parts(own, input.mesh, axes_of(input.layout, dims)).prod(0, dtype=own.dtype)
    return result_of(total.to(rounded) if rounded else total, input, dims, keepdim)


def _local_product(
    x: ShardedTensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
) -> Tensor:
    local = local_of(x)
    if local.numel():
        return local.prod(dtype=dtype) if dim is None else local.prod(dim, keepdim, dtype=dtype)
    # torch's product of an empty tensor has no second derivative, for which other ranks would wait.
    if dtype is None:  # autocast has another rule for sums
        dtype = result_dtype(torch.prod, ((1,), x), arguments=() if dim is None else (0,))
    nothing = local.square().sum(reduced_dims(x, dim), keepdim, dtype=dtype)
    return (nothing + 1).to(nothing.dtype)


@implements(torch.logsumexp, torch.Tensor.logsumexp)
@numpy_names
def logsumexp(input: ShardedTensor, dim: Dims, keepdim: bool = False) -> Any:
    """Computes the logarithm of the sum of exponentials over dims."""
    dims = reduced_dims(input, dim)
    if is_local(input, dims):
        return result_of(torch.logsumexp(local_of(input), dims, keepdim), input, dims, keepdim)
    rounded = in_full_precision(torch.logsumexp, input, 0)
    x = input.to(WIDER[input.dtype]) if rounded else input
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    with torch.no_grad():
        largest = reduce_amax((x.real if x.is_complex() else x).detach(), dims, keepdim=True)  # type: ignore[arg-type]
        largest = torch.where(largest.isinf(), 0, largest)
    total = reduce_sum((x - largest).exp(), dims, keepdim=True).log() + largest  # type: ignore[arg-type]
    if rounded:
        total = total.to(rounded)
    return total if keepdim else result_of(local_of(total).squeeze(dims), input, dims, False)


def _cosine_with_itself(x: Tensor) -> Tensor:
    return F.cosine_similarity(x, x, 0)


@implements(F.cosine_similarity, torch.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """Computes the cosine of the angle between vectors along a dim."""
    layout = broadcast_layout([x1, x2])
    like = next(x for x in (x1, x2) if isinstance(x, ShardedTensor))
    one, two = (
        wrap(operand_for(x, layout, layout.shape).expand(layout.local_shape), layout, like)
        for x in (x1, x2)
    )
    d = canonical(dim, len(layout.shape))
    if is_local(one, (d,)):
        cosine = F.cosine_similarity(local_of(one), local_of(two), d, eps)
        return result_of(cosine, one, (d,), False)
    rounded = in_full_precision(_cosine_with_itself, one)
    if rounded:
        one, two = one.to(torch.float32), two.to(torch.float32)  # type: ignore[assignment]
    units = []
    for x in (one, two):
        length = reduce_norm(x, 2, d, keepdim=True)
        # As in torch, the bound applies to the value but not to the gradient.
        units.append(x / (length + (length.detach().clamp_min(eps) - length.detach())))
    cosine = reduce_sum(units[0] * units[1], d)
    return cosine.to(rounded) if rounded else cosine


@implements(F.normalize)
def normalize(
    input: ShardedTensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    """Divides vectors along dims by their norm."""
    if out is not None:
        raise refusal(F.normalize, (input,), {}, "out= would fill only this rank's block")
    return input / reduce_norm(input, p, dim, keepdim=True).clamp_min(eps)


@implements(F.pairwise_distance, torch.pairwise_distance)
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Computes the p-norm of the difference along the last dim."""
    return reduce_norm(x1 - x2 + eps, p, -1, keepdim)  # type: ignore[arg-type]


@implements(torch.dist, torch.Tensor.dist)
def dist(input: Tensor, other: Tensor, p: float = 2) -> Any:
    """Computes the p-norm of the difference."""
    return reduce_norm(input - other, p)  # type: ignore[arg-type]
