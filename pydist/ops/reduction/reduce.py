"""Sums, means and variances over any dims: shards first, then the ranks that share the dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.comm.interface.ledger import CAUSE
from pydist.comm.interface.reduction import WIDER
from pydist.exchange.adjoints import sum_ranks
from pydist.exchange.function import Function
from pydist.gradients.members import lead_to
from pydist.layout import Layout
from pydist.ops.dims import canonical, canonical_all, numpy_names
from pydist.ops.pointwise.elementwise import elementwise
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap

Dims = int | Sequence[int] | None


def reduced_dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    """The dims to reduce, non-negative and sorted; all for `None` or ().

    A tensor without dims has none to reduce, but torch takes 0 and -1 for it.
    """
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    dims = canonical_all((dim,) if isinstance(dim, int) else tuple(dim), x.dim())
    return tuple(sorted(dims)) if x.dim() else ()


def axes_of(layout: Layout, dims: Sequence[int]) -> tuple[str, ...]:
    """The mesh axes over which the given dims are cut; none for a tensor without dims."""
    if not layout.splits:
        return ()
    return tuple(a for d in dims if (s := layout.splits[d]) is not None for a in s.axes)


def is_local(x: ShardedTensor, dims: Sequence[int]) -> bool:
    """Whether every rank can reduce `dims` on its own: torch's function on the shard is exact."""
    return x.mesh.grid.size(axes_of(x._layout, dims)) == 1


def in_full_precision(func: Callable[..., Tensor], x: ShardedTensor) -> torch.dtype | None:
    """The dtype of `func`'s result where its parts must not be rounded to it, `None` elsewhere.

    bf16 and fp16 are summed in fp32 by torch; so are the parts of the ranks. Which dtype the result
    has, autocast decides.
    """
    if x.dtype not in WIDER:
        return None
    return func(torch.ones(2, dtype=x.dtype, device=x.device)).dtype


def result_of(
    local: Tensor, x: ShardedTensor, dims: Sequence[int], keepdim: bool
) -> ShardedTensor | Tensor:
    """Wraps what is left after `dims` were reduced; a scalar is plain, as a loss has to be."""
    layout = x._layout
    if len(dims) >= len(layout.shape) and not keepdim:
        lead_to(local, layout.mesh, CAUSE.history, x._origin.sizes)
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
    local = local_of(x)
    if is_local(x, dims):
        return result_of(local.sum(dims, keepdim, dtype=dtype), x, dims, keepdim)
    rounded = dtype if dtype in WIDER else None if dtype else in_full_precision(torch.sum, x)
    if rounded:
        dtype = WIDER.get(rounded, rounded)
    total = sum_ranks(local.sum(dims, keepdim, dtype=dtype), x.mesh, axes_of(x._layout, dims))
    return result_of(total.to(rounded) if rounded else total, x, dims, keepdim)


def reduce_mean(
    x: ShardedTensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """Mean over dims, by the global count."""
    dims = reduced_dims(x, dim)
    if is_local(x, dims) or not (dtype or x.dtype).is_floating_point:
        mean = torch.mean(local_of(x), dims, keepdim, dtype=dtype)  # it refuses integers
        return result_of(mean, x, dims, keepdim)
    rounded = dtype if dtype in WIDER else None if dtype else in_full_precision(torch.mean, x)
    wide = WIDER.get(rounded, rounded) if rounded else dtype
    mean = reduce_sum(x, dims, keepdim, wide) / math.prod(x.shape[d] for d in dims)
    return mean.to(rounded) if rounded else mean


@implements(torch.sum, torch.Tensor.sum)
@numpy_names
def _sum(
    input: ShardedTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    return reduce_sum(input, dim, keepdim, dtype)


@implements(torch.mean, torch.Tensor.mean)
@numpy_names
def _mean(
    input: ShardedTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    return reduce_mean(input, dim, keepdim, dtype)


@implements(torch.nansum, torch.Tensor.nansum)
@numpy_names
def _nansum(
    input: ShardedTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    return reduce_sum(input.masked_fill(input.isnan(), 0), dim, keepdim, dtype)  # type: ignore[arg-type]


@implements(torch.nanmean, torch.Tensor.nanmean)
@numpy_names
def _nanmean(
    input: ShardedTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    number = reduce_sum(input.isnan().logical_not(), dim, keepdim)  # type: ignore[arg-type]
    return _nansum(input, dim, keepdim, dtype=dtype) / number


@implements(torch.count_nonzero, torch.Tensor.count_nonzero)
def _count_nonzero(input: ShardedTensor, dim: Dims = None) -> Any:
    return reduce_sum(elementwise(torch.ne, input, 0), dim)


@implements(torch.any, torch.Tensor.any)
@numpy_names
def _any(input: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Any:
    found = reduce_sum(elementwise(torch.ne, input, 0), dim, keepdim) > 0
    return found.to(torch.uint8) if input.dtype == torch.uint8 else found


@implements(torch.all, torch.Tensor.all)
@numpy_names
def _all(input: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Any:
    found = reduce_sum(elementwise(torch.eq, input, 0), dim, keepdim) == 0
    return found.to(torch.uint8) if input.dtype == torch.uint8 else found


class _SquaredDeviation(Function):
    """(x - mean)², where the mean is that of all values that are summed.

    The deviations then have the sum 0, and so has the mean's gradient, in all orders. It is left
    out, as in torch: of an infinite gradient it would be inf - inf.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean)
        return (x - mean).square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        return 2 * grad * (x - mean), None


def _moments(
    func: Callable[..., Any],
    input: ShardedTensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Any, Any]:
    """torch.var_mean and torch.std_mean, in two passes."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = reduced_dims(input, dim)
    correction = float(unbiased) if correction is None else correction
    if is_local(input, dims) and local_of(input).numel():  # of nothing torch warns
        both = func(local_of(input), dims, correction=correction, keepdim=keepdim)
        return tuple(result_of(part, input, dims, keepdim) for part in both)  # type: ignore[return-value]
    rounded = in_full_precision(torch.var, input)
    wide = input.to(WIDER[input.dtype]) if rounded else input
    mean = reduce_mean(wide, dims, keepdim=True)  # type: ignore[arg-type]
    with torch.no_grad():
        # Exactly that of equal values, as torch's own mostly is: a deviation of rounding errors
        # would have a gradient as large as any other.
        deviation = elementwise(torch.sub, wide, mean)
        rounding = reduce_mean(deviation, dims, keepdim=True)
    exact = elementwise(torch.add, mean, rounding)
    squares = elementwise(_SquaredDeviation.apply, wide, exact)
    count = math.prod(input.shape[d] for d in dims)
    var = reduce_sum(squares, dims, keepdim) / max(0.0, count - correction)
    if func is torch.std_mean:
        # At 0 sqrt has no gradient; torch takes that of the deviation to be 0.
        zero = var == 0
        var = torch.where(zero, 0, torch.where(zero, 1, var).sqrt())
    if not keepdim:
        mean = reduce_mean(wide, dims)  # type: ignore[arg-type]
    return (var.to(rounded), mean.to(rounded)) if rounded else (var, mean)


def _moment_handlers(both: Callable[..., Any], first: Callable[..., Any]) -> None:
    @implements(both)
    @numpy_names
    def pair(input: ShardedTensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return _moments(both, input, *args, **kwargs)

    @implements(first, getattr(torch.Tensor, first.__name__))
    @numpy_names
    def single(input: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        return _moments(both, input, *args, **kwargs)[0]


_moment_handlers(torch.var_mean, torch.var)
_moment_handlers(torch.std_mean, torch.std)


def along_whole_dim(
    func: Any, x: ShardedTensor, dim: int, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Calls that reduce one dim and are exact on shards where that dim is whole."""
    d = canonical(dim, x.dim())
    if not is_local(x, (d,)):
        raise refusal(func, (x,), {}, f"dim {d} is split")
    result = func(local_of(x), d, keepdim, **kwargs)
    if isinstance(result, Tensor):
        return result_of(result, x, (d,), keepdim)
    return type(result)([result_of(part, x, (d,), keepdim) for part in result])


def _whole_dim_handler(func: Any) -> None:
    @implements(func, getattr(torch.Tensor, func.__name__))
    @numpy_names
    def handler(input: ShardedTensor, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            raise refusal(func, (input,), {}, "only along one dim, that is whole")
        return along_whole_dim(func, input, dim, keepdim)


for _func in (torch.median, torch.nanmedian, torch.mode):
    _whole_dim_handler(_func)
