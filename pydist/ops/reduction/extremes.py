"""Computes extremes over any dims, their indices, and gradients with torch's rule for ties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.comm import ReduceOp
from pydist.exchange.adjoints import average_back
from pydist.exchange.function import ExchangeFunction
from pydist.mesh import Mesh
from pydist.ops.dims import canonical, numpy_names
from pydist.ops.pointwise.elementwise import elementwise
from pydist.ops.reduction.reduce import Dims, axes_of, is_local, reduced_dims, result_of
from pydist.tensor import ShardedTensor, implements, local_of

_AFTER_ALL = torch.iinfo(torch.int64).max


class _GradientOfSum(ExchangeFunction):
    """Zeros that add the gradient of a sum over ranks to a value without changing its bits.

    Forward has no exchange, so that a rank that records no graph may omit the call.
    """

    part = None  # `average_back` measures

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return average_back(grad, ctx.mesh, ctx.axes), None, None


def _worst(dtype: torch.dtype, op: ReduceOp) -> float | int | bool:
    """Returns the neutral value of a maximum or minimum in a dtype, such as -inf."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _reduce(x: ShardedTensor, dims: Sequence[int], value: Tensor, op: ReduceOp) -> None:
    """Reduces a value over the ranks that divide `dims`, in place."""
    with x.mesh.session.timers.measure("statistics"):
        x.mesh.group(axes_of(x.layout, dims)).all_reduce(value, op)


def _best(x: ShardedTensor, dims: tuple[int, ...], op: ReduceOp) -> Tensor:
    """Computes the global extreme without gradient, with the reduced dims kept."""
    local = local_of(x).detach()
    if all(local.shape[d] for d in dims):
        value = (torch.amax if op == "max" else torch.amin)(local, dims, keepdim=True).contiguous()
    else:
        shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
        value = local.new_full(shape, _worst(local.dtype, op))
    _reduce(x, dims, value, op)
    return value


def _equals(local: Tensor, value: Tensor) -> Tensor:
    """Returns a mask of elements equal to the extreme; NaN equals NaN, as in torch."""
    hit = local == value
    return hit | (local.isnan() & value.isnan()) if local.is_floating_point() else hit


def _with_gradient(
    x: ShardedTensor, value: Tensor, dims: tuple[int, ...], keepdim: bool, hit: Tensor, count: Any
) -> Any:
    """Returns the extreme with a gradient to the elements in `hit`, each with a share 1 / count."""
    if torch.is_grad_enabled() and local_of(x).requires_grad:
        share = (local_of(x) * hit).sum(dims, keepdim=True) / count
        value = value + _GradientOfSum.apply(share, x.mesh, axes_of(x.layout, dims))
    return result_of(value if keepdim else value.squeeze(dims), x, dims, keepdim)


def _extreme(x: ShardedTensor, dim: Dims, keepdim: bool, op: ReduceOp, of_all: bool = False) -> Any:
    """Reduces to the maximum or minimum; ties share the gradient, as in torch.amax, torch.max()."""
    dims = reduced_dims(x, dim)
    local = local_of(x)
    if is_local(x, dims):
        if of_all:
            return result_of((torch.max if op == "max" else torch.min)(local), x, dims, False)
        reduced = (torch.amax if op == "max" else torch.amin)(local, dims, keepdim)
        return result_of(reduced, x, dims, keepdim)
    value = _best(x, dims, op)
    with torch.no_grad():
        hit = _equals(local, value) if of_all else local == value
        count = hit.sum(dims, keepdim=True)
        _reduce(x, dims, count, "sum")
    return _with_gradient(x, value, dims, keepdim, hit, count)


def reduce_amax(x: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    """Computes the maximum over dims."""
    return _extreme(x, dim, keepdim, "max")


def reduce_amin(x: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    """Computes the minimum over dims."""
    return _extreme(x, dim, keepdim, "min")


def _place(x: ShardedTensor, d: int, op: ReduceOp) -> tuple[Tensor, Tensor]:
    """Finds the global extreme along a split dim and its first global index, keeping the dim."""
    local = local_of(x).detach()
    value = _best(x, (d,), op)
    if local.shape[d]:
        own, index = (torch.max if op == "max" else torch.min)(local, d, keepdim=True)
        index = torch.where(_equals(own, value), index + x.layout.box.lo[d], _AFTER_ALL)
    else:
        index = torch.full(value.shape, _AFTER_ALL, device=local.device)
    index = index.contiguous()
    _reduce(x, (d,), index, "min")
    return value, index


def _along_dim(func: Callable[..., Any], x: ShardedTensor, dim: int, keepdim: bool) -> Any:
    """Computes values and indices of torch.max or torch.min over one dim."""
    d = canonical(dim, x.dim())
    kind: Any = torch.return_types.max if func is torch.max else torch.return_types.min
    local = local_of(x)
    if is_local(x, (d,)):
        return kind([result_of(part, x, (d,), keepdim) for part in func(local, d, keepdim)])
    value, index = _place(x, d, "max" if func is torch.max else "min")
    box = x.layout.box
    along = torch.arange(box.lo[d], box.hi[d], device=local.device)
    hit = along.view(-1, *(1 for _ in range(d + 1, x.dim()))) == index
    values = _with_gradient(x, value, (d,), keepdim, hit, 1)
    return kind([values, result_of(index if keepdim else index.squeeze(d), x, (d,), keepdim)])


def _argument(
    func: Callable[..., Tensor], x: ShardedTensor, dim: int | None, keepdim: bool
) -> Tensor:
    """Computes argmax or argmin over one dim, or over all elements in the global order."""
    op: ReduceOp = "max" if func is torch.argmax else "min"
    dims = reduced_dims(x, dim)
    local = local_of(x)
    if is_local(x, dims):
        index = func(local.detach(), dim, keepdim)
    elif dim is not None:
        index = _place(x, dims[0], op)[1]
        index = index if keepdim else index.squeeze(dims)
    else:
        hit = _equals(local.detach(), _best(x, dims, op))
        places = torch.where(hit, _order(x), _AFTER_ALL).flatten()
        index = torch.cat([places, places.new_tensor([_AFTER_ALL])]).amin()
        _reduce(x, dims, index, "min")
        index = index.view([1] * x.dim()) if keepdim else index
    return result_of(index, x, dims, keepdim)


def _order(x: ShardedTensor) -> Tensor:
    """Returns the global flat index of each element of the shard."""
    box, shape = x.layout.box, x.shape
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in range(x.dim()):
        along = torch.arange(box.lo[d], box.hi[d], device=x.device) * math.prod(shape[d + 1 :])
        total = total.unsqueeze(-1) + along
    return total


def _max_or_min(func: Any, x: Tensor, args: tuple[Any, ...], kwargs: Any) -> Any:
    if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        pairwise = torch.maximum if func is torch.max else torch.minimum
        return elementwise(pairwise, x, *args, **kwargs)
    assert isinstance(x, ShardedTensor)  # the only tensor
    if not args and not kwargs:
        return _extreme(x, None, False, "max" if func is torch.max else "min", of_all=True)
    return _dim_and_keepdim(func, x, *args, **kwargs)


@numpy_names
def _dim_and_keepdim(func: Any, x: ShardedTensor, dim: int, keepdim: bool = False) -> Any:
    return _along_dim(func, x, dim, keepdim)


@implements(torch.max, torch.Tensor.max)
def _max(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _max_or_min(torch.max, input, args, kwargs)


@implements(torch.min, torch.Tensor.min)
def _min(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _max_or_min(torch.min, input, args, kwargs)


@implements(torch.amax, torch.Tensor.amax)
@numpy_names
def _amax(input: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    return reduce_amax(input, dim, keepdim)


@implements(torch.amin, torch.Tensor.amin)
@numpy_names
def _amin(input: ShardedTensor, dim: Dims = (), keepdim: bool = False) -> Any:
    return reduce_amin(input, dim, keepdim)


@implements(torch.aminmax, torch.Tensor.aminmax)
def _aminmax(input: ShardedTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    both = [reduce_amin(input, dim, keepdim), reduce_amax(input, dim, keepdim)]
    return torch.return_types.aminmax(both)  # type: ignore[arg-type]


@implements(torch.argmax, torch.Tensor.argmax)
@numpy_names
def _argmax(input: ShardedTensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return _argument(torch.argmax, input, dim, keepdim)


@implements(torch.argmin, torch.Tensor.argmin)
@numpy_names
def _argmin(input: ShardedTensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return _argument(torch.argmin, input, dim, keepdim)
