"""Handles calls along one dim: softmax, scans, sorts, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.ops.dims import canonical, canonical_all, numpy_names
from pydist.ops.dtypes import NARROW, result_dtype
from pydist.ops.reduction.reduce import is_local
from pydist.ops.transposition import along_dims
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap
from pydist.tensor.operands import whole_operand


def _softmax(x: ShardedTensor, dim: int | None, dtype: torch.dtype | None, log: bool) -> Any:
    func = torch.log_softmax if log else torch.softmax
    if dim is None:
        raise refusal(func, (x,), {}, "give the dim")
    d = canonical(dim, x.dim())
    if is_local(x, (d,)):
        return wrap(func(local_of(x), d, dtype=dtype), x.layout, x)
    if not (dtype or x.dtype).is_floating_point:
        raise RuntimeError(f"{func.__name__} of {dtype or x.dtype}: give a floating-point dtype")
    result = dtype or result_dtype(func, ((2,), x), arguments=(0,))
    inside = torch.float32 if result in NARROW else result
    wide = x.to(inside)
    shifted = wide - wide.detach().amax(d, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(d, keepdim=True)
    return (shifted - total.log() if log else weights / total).to(result)


@implements(F.softmax, torch.softmax, torch.Tensor.softmax)
@numpy_names
def softmax(
    input: ShardedTensor, dim: int | None = None, *given: Any, dtype: Any = None, **_: Any
) -> Any:
    """Computes softmax over a dim; over a split dim the ranks all-reduce its maximum and sum."""
    return _softmax(input, dim, _dtype(given, dtype), log=False)


@implements(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax)
@numpy_names
def log_softmax(
    input: ShardedTensor, dim: int | None = None, *given: Any, dtype: Any = None, **_: Any
) -> Any:
    """Computes the logarithm of the softmax."""
    return _softmax(input, dim, _dtype(given, dtype), log=True)


@implements(F.softmin)
@numpy_names
def softmin(
    input: ShardedTensor, dim: int | None = None, *given: Any, dtype: Any = None, **_: Any
) -> Any:
    """Computes softmax of the negated values."""
    return _softmax(-input, dim, _dtype(given, dtype), log=False)  # type: ignore[arg-type]


def _dtype(given: tuple[Any, ...], dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns a dtype given by position: after F's `_stacklevel`, or directly after the dim."""
    return next((g for g in given if isinstance(g, torch.dtype)), dtype)


def _mixes_one_dim(name: str, positional: tuple[str, ...] = ("dim",)) -> None:
    """Registers a call along one dim whose results have the input's extents in the other dims."""
    func = getattr(torch, name)

    @implements(func, getattr(torch.Tensor, name))
    @numpy_names
    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(positional, args, strict=False)) | kwargs
        if any(isinstance(value, Tensor) for value in named.values()):
            raise refusal(func, (input,), {}, "all arguments but the input must be numbers")
        d = canonical(named.get("dim", -1), input.dim())
        return along_dims(partial(func, **named), input, (d,))


for _name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
    _mixes_one_dim(_name)
for _name in ("sort", "argsort"):
    _mixes_one_dim(_name, ("dim", "descending"))
_mixes_one_dim("topk", ("k", "dim", "largest", "sorted"))


@implements(torch.diff, torch.Tensor.diff)
@numpy_names
def diff(
    input: ShardedTensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """Computes `n`-th differences; along a split dim the ranks exchange their first elements."""
    if n < 0 or input.dim() == 0:
        raise RuntimeError(f"diff of order {n} and {input.dim()} dims: 0 and more, and 1 and more")
    d = canonical(dim, input.dim())
    parts = [part for part in (prepend, input, append) if part is not None]
    x: Tensor = torch.cat(parts, d) if n > 0 and len(parts) > 1 else input
    for _ in range(n):
        count = max(x.shape[d] - 1, 0)
        upper, lower = x.narrow(d, x.shape[d] - count, count), x.narrow(d, 0, count)
        x = upper.logical_xor(lower) if x.dtype == torch.bool else upper - lower
    return x if n > 0 else x.clone()


@implements(torch.gradient)
def gradient(
    input: ShardedTensor,
    *,
    spacing: Any = None,
    dim: int | Sequence[int] | None = None,
    edge_order: int = 1,
) -> tuple[Tensor, ...]:
    """Estimates the derivatives along dims, which each rank has one after the other as a whole."""
    given = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = canonical_all(given, input.dim())
    steps = spacing if isinstance(spacing, list | tuple) else [spacing] * len(dims)
    if len(steps) != len(dims):
        raise RuntimeError(f"gradient along {len(dims)} dims: a spacing of {len(steps)} elements")

    def along(local: Tensor, d: int, step: Any) -> Tensor:
        # Coordinates are given as a list, one number is not.
        found = [whole_operand(step, input)] if isinstance(step, Tensor) else step
        return torch.gradient(local, spacing=found, dim=d, edge_order=edge_order)[0]

    return tuple(
        along_dims(partial(along, d=d, step=step), input, (d,))
        for d, step in zip(dims, steps, strict=True)
    )


@implements(torch.msort, torch.Tensor.msort)
def msort(input: ShardedTensor) -> Any:
    """Returns the values in order along the first dim."""
    return torch.sort(input, dim=0).values
