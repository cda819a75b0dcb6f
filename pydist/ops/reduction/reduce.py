"""Computes sums, means and variances over any dims: first per shard, then over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.comm.interface.reduction import WIDER
from pydist.exchange.adjoints import all_reduce_sum
from pydist.exchange.function import Function
from pydist.layout import Layout
from pydist.ops.dims import canonical_all, numpy_names
from pydist.ops.dtypes import result_dtype
from pydist.ops.pointwise.elementwise import elementwise
from pydist.tensor import ShardedTensor, implements, local_of, plain_result, wrap

Dims = int | Sequence[int] | None


def reduced_dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    """Returns the dims to reduce, non-negative and sorted; all for `None` or ().

    A tensor without dims has no dims to reduce, but torch accepts 0 and -1 for it.
    """
    if dim is None or _names_no_dim(dim):
        return tuple(range(x.dim()))
    dims = canonical_all((dim,) if isinstance(dim, int) else tuple(dim), x.dim())
    return tuple(sorted(dims)) if x.dim() else ()


def axes_of(layout: Layout, dims: Sequence[int]) -> tuple[str, ...]:
    """Returns the mesh axes that split the given dims; none for a tensor without dims."""
    if not layout.splits:
        return ()
    return tuple(a for d in dims if (s := layout.splits[d]) is not None for a in s.axes)


def is_local(x: ShardedTensor, dims: Sequence[int]) -> bool:
    """Returns whether each rank can reduce `dims` alone: torch's function is exact on shards.

    It is so, too, where a dim is empty, and so on every rank: torch refuses extremes of nothing.
    """
    layout = x.layout
    return x.mesh.grid.size(axes_of(layout, dims)) == 1 or any(layout.shape[d] == 0 for d in dims)


def in_full_precision(
    func: Callable[..., Tensor], x: Tensor, *arguments: Any, shape: tuple[int, ...] = (2,)
) -> torch.dtype | None:
    """Returns the dtype of `func`'s result if partial sums must be wider, else `None`.

    torch sums bf16 and fp16 in fp32; so the ranks' partial sums are in fp32 as well. The dtype of
    the result depends on autocast.

    Args:
        func: see `result_dtype`.
        x: the operand.
        arguments: further arguments of `func`, hashable.
        shape: that `func` accepts with them.
    """
    if x.dtype not in WIDER:
        return None
    return result_dtype(func, (shape, x), arguments=arguments)


def result_of(
    local: Tensor, x: ShardedTensor, dims: Sequence[int], keepdim: bool
) -> ShardedTensor | Tensor:
    """Wraps a result in which `dims` were reduced; a scalar is plain, as a loss must be.

    Args:
        local: the result of this rank, equal along the axes that cut `dims`.
        x: the operand.
        dims: those that were reduced, 0 or above.
        keepdim: whether they remain, with extent 1.
    """
    layout = x.layout
    if len(dims) >= len(layout.shape) and not keepdim:
        return plain_result(local, x)
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
    """Computes the sum over dims."""
    dims = reduced_dims(x, dim)
    local = local_of(x)
    if is_local(x, dims):
        return result_of(local.sum(dims, keepdim, dtype=dtype), x, dims, keepdim)
    if dtype == torch.bool:  # whose sum is "any"; transports would add the bytes
        return reduce_sum(elementwise(torch.ne, x, 0), dims, keepdim) > 0
    rounded = _rounded_to(torch.sum, x, dtype)
    if rounded:
        dtype = WIDER.get(rounded, rounded)
    total = all_reduce_sum(local.sum(dims, keepdim, dtype=dtype), x.mesh, axes_of(x.layout, dims))
    return result_of(total.to(rounded) if rounded else total, x, dims, keepdim)


def reduce_mean(
    x: ShardedTensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """Computes the mean over dims, by the global count."""
    dims = reduced_dims(x, dim)
    summed = dtype or x.dtype
    if is_local(x, dims) or not (summed.is_floating_point or summed.is_complex):
        mean = torch.mean(local_of(x), dims, keepdim, dtype=dtype)  # torch refuses integers
        return result_of(mean, x, dims, keepdim)
    rounded = _rounded_to(torch.mean, x, dtype)
    wide = WIDER.get(rounded, rounded) if rounded else dtype
    mean = reduce_sum(x, dims, keepdim, wide) / math.prod(x.shape[d] for d in dims)
    return mean.to(rounded) if rounded else mean


def _rounded_to(
    function: Callable[..., Any], x: ShardedTensor, dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns the dtype to which a wider result is rounded; `None` if it needs no rounding."""
    if dtype is None:
        return in_full_precision(function, x)
    return dtype if dtype in WIDER else None


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
    total = reduce_sum(input.masked_fill(input.isnan(), 0), dim, keepdim, dtype)  # type: ignore[arg-type]
    # On a device, autocast has a rule for the sum and none for this one.
    return total if dtype else total.to(result_dtype(torch.nansum, ((2,), input)))


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
    found = elementwise(torch.ne, input, 0)
    if not _names_no_dim(dim):
        found = reduce_sum(found, dim, keepdim) > 0
    return found.to(torch.uint8) if input.dtype == torch.uint8 else found


def _names_no_dim(dim: Dims) -> bool:
    """Returns whether `dim` is (): no dim for any() and all(), all dims for other reductions."""
    return dim is not None and not isinstance(dim, int) and len(dim) == 0


@implements(torch.all, torch.Tensor.all)
@numpy_names
def _all(input: ShardedTensor, dim: Dims = None, keepdim: bool = False) -> Any:
    if _names_no_dim(dim):
        return _any(input, dim)
    found = reduce_sum(elementwise(torch.eq, input, 0), dim, keepdim) == 0
    return found.to(torch.uint8) if input.dtype == torch.uint8 else found


@implements(torch._is_all_true)
def _is_all_true(input: ShardedTensor) -> Any:
    return _all(input)  # as the arguments of torch.distributions are validated


class _SquaredDeviation(Function):
    """Function |x - mean|², where the mean is over all values that are summed afterwards.

    The deviations then add up to 0, so the mean's gradient is 0 in all orders. It is omitted, as in
    torch: with an infinite gradient it would be inf - inf.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean)
        deviation = x - mean
        return (deviation * deviation.conj()).real if x.is_complex() else deviation.square()

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
    """Computes torch.var_mean or torch.std_mean, in two passes."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = reduced_dims(input, dim)
    correction = float(unbiased) if correction is None else correction
    if is_local(input, dims) and local_of(input).numel():  # torch warns for an empty tensor
        both = func(local_of(input), dims, correction=correction, keepdim=keepdim)
        return tuple(result_of(part, input, dims, keepdim) for part in both)  # type: ignore[return-value]
    rounded = in_full_precision(torch.var, input)
    wide = input.to(WIDER[input.dtype]) if rounded else input
    mean = reduce_mean(wide, dims, keepdim=True)  # type: ignore[arg-type]
    with torch.no_grad():
        # Corrects the mean to be exact for equal values, as torch's mostly is: deviations that are
        # rounding errors would get a gradient as large as any other.
        deviation = elementwise(torch.sub, wide, mean)
        rounding = reduce_mean(deviation, dims, keepdim=True)
    exact = elementwise(torch.add, mean, rounding)
    squares = elementwise(_SquaredDeviation.apply, wide, exact)
    count = math.prod(input.shape[d] for d in dims)
    var = reduce_sum(squares, dims, keepdim) / max(0.0, count - correction)
    if func is torch.std_mean:
        # sqrt has no gradient at 0; torch defines the gradient of the deviation as 0.
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
