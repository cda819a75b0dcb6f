"""Computes order statistics: median, mode, quantiles, the k-th value, histograms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.ops.dims import canonical, numpy_names
from pydist.ops.reduction.extremes import reduce_amax, reduce_amin
from pydist.ops.reduction.reduce import result_of
from pydist.ops.transposition import along_dims
from pydist.tensor import ShardedTensor, implements, local_of, refusal
from pydist.tensor.operands import prove_equal, redistribute


def _along(func: Callable[..., Any], x: ShardedTensor, dim: int, keepdim: bool) -> Any:
    """Reduces one dim to values and indices."""
    d = canonical(dim, x.dim())
    kept = along_dims(lambda local: func(local, dim=d, keepdim=True), x, (d,))
    return kept if keepdim else type(kept)([_without(part, d) for part in kept])


def _without(x: ShardedTensor, d: int) -> Any:
    """Removes a dim of extent 1; a scalar is plain."""
    if x.dim():  # extent 1 may be split, too
        x = redistribute(x, x.layout.replace(changes={d: None}))
    return result_of(local_of(x).squeeze(d), x, (d,), False)


def _register(func: Any) -> None:
    @implements(func, getattr(torch.Tensor, func.__name__))
    @numpy_names
    def handler(input: ShardedTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None and func is not torch.mode:
            return func(input.full_tensor())
        return _along(func, input, -1 if dim is None else dim, keepdim)


for _func in (torch.median, torch.nanmedian, torch.mode):
    _register(_func)


@implements(torch.kthvalue, torch.Tensor.kthvalue)
@numpy_names
def kthvalue(input: ShardedTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Returns the k-th smallest value along a dim, and its index."""
    return _along(partial(torch.kthvalue, k=k), input, dim, keepdim)


def _quantile(
    func: Callable[..., Tensor],
    input: ShardedTensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Any:
    """Computes quantiles along a dim or, with each rank gathering all elements, of all of them."""
    if isinstance(q, ShardedTensor) or (isinstance(q, Tensor) and q.requires_grad):
        raise refusal(func, (input, q), {}, "q is split or requires a gradient")
    if isinstance(q, Tensor):
        prove_equal(q, input.layout)
    if dim is None:
        return func(input.full_tensor(), q, None, keepdim, interpolation=interpolation)
    d = canonical(dim, input.dim())
    several = isinstance(q, Tensor) and q.dim() > 0

    def kept(local: Tensor) -> Tensor:
        found = func(local, q, d, True, interpolation=interpolation)
        # Several quantiles are along a new first dim.
        return found.movedim(0, d).squeeze(d + 1) if several else found

    found = along_dims(kept, input, (d,))
    if several:
        found = found.movedim(d, 0)
        return found.unsqueeze(d + 1) if keepdim else found
    return found if keepdim else _without(found, d)


for _name in ("quantile", "nanquantile"):
    _function = getattr(torch, _name)
    implements(_function, getattr(torch.Tensor, _name))(partial(_quantile, _function))


@implements(torch.histc, torch.Tensor.histc)
def histc(input: ShardedTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts elements in equal bins; the result is plain and equal on all ranks."""
    local, layout = local_of(input).detach(), input.layout
    if min == max and input.numel():
        min, max = (float(f(input.detach())) for f in (reduce_amin, reduce_amax))  # type: ignore[arg-type]
        if min == max:  # as in torch
            min, max = min - 1, max + 1
    counts = torch.histc(local, bins, min, max)
    group = layout.mesh.group(layout.used_axes)
    if group.size > 1:
        with layout.mesh.session.timers.measure("statistics"):
            group.all_reduce(counts)
    return counts
