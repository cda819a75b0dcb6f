"""Reductions over any dims of sharded tensors: shards first, then the ranks that share the dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.comm.adjoints import sum_ranks
from pydist.comm.transport import ReduceOp
from pydist.layout import Layout
from pydist.ops.dims import canonical, canonical_all
from pydist.ops.elementwise import elementwise
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap

Dims = int | Sequence[int] | None


def reduced_dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    """The dims to reduce, non-negative and sorted; all for `None` or ()."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted(canonical_all(dims, x.dim())))


def axes_of(layout: Layout, dims: Sequence[int]) -> tuple[str, ...]:
    """The mesh axes over which the given dims are cut."""
    return tuple(a for d in dims if (s := layout.splits[d]) is not None for a in s.axes)


def result_of(
    local: Tensor, x: ShardedTensor, dims: Sequence[int], keepdim: bool
) -> ShardedTensor | Tensor:
    """Wraps what is left after `dims` were reduced; a scalar is plain, as a loss has to be."""
    layout = x._layout
    if len(dims) == len(layout.shape) and not keepdim:
        return local
    shape: list[int] = []
    splits: list[Any] = []
    for d, (extent, split) in enumerate(zip(layout.shape, layout.splits, strict=True)):
        if d not in dims:
            shape.append(extent)
            splits.append(split)
        elif keepdim:
            shape.append(1)
            splits.append(None)
    return wrap(local, Layout(layout.mesh, shape, splits), x)


def reduce_sum(
    x: ShardedTensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """Sum over dims."""
    dims = reduced_dims(x, dim)
    local = local_of(x).sum(dims, keepdim, dtype=dtype)
    total = sum_ranks(local, x.mesh, axes_of(x._layout, dims))
    return result_of(total, x, dims, keepdim)


def reduce_mean(
    x: ShardedTensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """Mean over dims, by the global count."""
    count = math.prod(x.shape[d] for d in reduced_dims(x, dim))
    return reduce_sum(x, dim, keepdim, dtype) / count


def _extreme(x: ShardedTensor, dim: Dims, keepdim: bool, op: ReduceOp) -> Any:
    """Maximum or minimum; equal values share the gradient, as under torch.amax."""
    dims = reduced_dims(x, dim)
    axes = axes_of(x._layout, dims)
    local = local_of(x)
    if not axes:
        reduced = (torch.amax if op == "max" else torch.amin)(local, dims, keepdim)
        return result_of(reduced, x, dims, keepdim)
    with torch.no_grad():
        bound = -math.inf if op == "max" else math.inf
        if local.numel():
            value = (torch.amax if op == "max" else torch.amin)(local, dims, keepdim=True)
        else:
            shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
            value = local.new_full(shape, bound)
        value = value.contiguous()
        x.mesh.group(axes).all_reduce(value, op)
        hit = local == value
    holders = sum_ranks(hit.sum(dims, keepdim=True).to(local.dtype), x.mesh, axes)
    share = torch.where(hit, local, 0).sum(dims, keepdim) / holders.view(
        holders.sum(dims, keepdim).shape
    )
    return result_of(sum_ranks(share, x.mesh, axes), x, dims, keepdim)


def reduce_amax(x: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    """Maximum over dims."""
    return _extreme(x, dim, keepdim, "max")


def reduce_amin(x: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    """Minimum over dims."""
    return _extreme(x, dim, keepdim, "min")


@implements(torch.sum, torch.Tensor.sum)
def _sum(
    input: ShardedTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **as_in_numpy: Any,
) -> Any:
    return reduce_sum(input, *_names(dim, keepdim, **as_in_numpy), dtype)


@implements(torch.mean, torch.Tensor.mean)
def _mean(
    input: ShardedTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **as_in_numpy: Any,
) -> Any:
    return reduce_mean(input, *_names(dim, keepdim, **as_in_numpy), dtype)


def _names(
    dim: Dims, keepdim: bool, axis: Dims = None, keepdims: bool | None = None
) -> tuple[Dims, bool]:
    """PyTorch takes NumPy's names for these two as well."""
    return (axis if dim is None else dim), (keepdim if keepdims is None else keepdims)


@implements(torch.amax, torch.Tensor.amax)
def _amax(input: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    return reduce_amax(input, dim, keepdim)


@implements(torch.amin, torch.Tensor.amin)
def _amin(input: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    return reduce_amin(input, dim, keepdim)


@implements(torch.max, torch.Tensor.max)
def _max(input: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    return _max_or_min(torch.max, input, args, kwargs)


@implements(torch.min, torch.Tensor.min)
def _min(input: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    return _max_or_min(torch.min, input, args, kwargs)


def _max_or_min(func: Any, x: ShardedTensor, args: tuple[Any, ...], kwargs: Any) -> Any:
    if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        pairwise = torch.maximum if func is torch.max else torch.minimum
        return elementwise(pairwise, x, *args, **kwargs)
    if not args and not kwargs:
        return (reduce_amax if func is torch.max else reduce_amin)(x)
    return along_whole_dim(func, x, *args, **kwargs)


def along_whole_dim(
    func: Any, x: ShardedTensor, dim: int, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Calls that reduce one dim and are exact on shards where that dim is whole."""
    d = canonical(dim, x.dim())
    if x._layout.splits[d] is not None:
        raise refusal(func, (x,), {}, f"dim {d} is split")
    result = func(local_of(x), d, keepdim, **kwargs)
    if isinstance(result, Tensor):
        return result_of(result, x, (d,), keepdim)
    return type(result)([result_of(part, x, (d,), keepdim) for part in result])


def _whole_dim_handler(func: Any) -> None:
    @implements(func, getattr(torch.Tensor, func.__name__))
    def handler(input: ShardedTensor, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            raise refusal(func, (input,), {}, "give the dim")
        return along_whole_dim(func, input, dim, keepdim)


for _func in (torch.argmax, torch.argmin, torch.logsumexp, torch.prod, torch.median):
    _whole_dim_handler(_func)


@implements(torch.any, torch.Tensor.any)
def _any(input: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Any:
    return reduce_sum(elementwise(torch.ne, input, 0), dim, keepdim) > 0


@implements(torch.all, torch.Tensor.all)
def _all(input: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Any:
    return reduce_sum(elementwise(torch.eq, input, 0), dim, keepdim) == 0


@implements(torch.var, torch.Tensor.var)
def reduce_var(
    input: ShardedTensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    """Variance over dims, in two passes."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = reduced_dims(input, dim)
    count = math.prod(input.shape[d] for d in dims)
    correction = float(unbiased) if correction is None else correction
    deviation = input - reduce_mean(input, dims, keepdim=True)
    return reduce_sum(deviation * deviation, dims, keepdim) / max(0.0, count - correction)


@implements(torch.std, torch.Tensor.std)
def reduce_std(input: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Standard deviation over dims."""
    return reduce_var(input, *args, **kwargs).sqrt()


@implements(torch.norm, torch.Tensor.norm, torch.linalg.vector_norm)
def reduce_norm(
    input: ShardedTensor,
    p: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Any:
    """1-, 2- and maximum norm over dims."""
    p = kwargs.get("ord", p)
    if dtype is not None:
        input = elementwise(torch.Tensor.to, input, dtype)
    if p == math.inf:
        return reduce_amax(elementwise(torch.abs, input), dim, keepdim)
    if p == 1:
        return reduce_sum(elementwise(torch.abs, input), dim, keepdim)
    if p not in (2, "fro"):
        raise refusal(torch.norm, (input,), {}, f"order {p}; 1, 2 and inf have one")
    squares = reduce_sum(elementwise(torch.mul, input, input), dim, keepdim)
    # sqrt has no gradient at 0, where the norm's is taken to be 0.
    zero = squares == 0
    return torch.where(zero, 0, torch.where(zero, 1, squares).sqrt())
