"""Pools sharded tensors to averages, maxima or power averages, also in overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pydist.layout import Layout
from pydist.ops.coarsening import coarsen_if_faster, pool_workload
from pydist.ops.fusion.pool import average_pool_of_relu
from pydist.ops.pointwise.elementwise import elementwise
from pydist.ops.pool.average import AveragePlan, Averaging, average
from pydist.ops.pool.maximum import MaxPlan, maximum
from pydist.ops.pool.pool_plan import (
    Pair,
    batched,
    refuse_integers,
    unbatched,
    widened,
    with_indices,
)
from pydist.ops.windows import Window, WindowPlan, as_keys, as_tuple, plan_window, symmetric
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal, wrap, wrap_new
from pydist.tensor.operands import redistribute

_AVG = {1: torch.avg_pool1d, 2: torch._C._nn.avg_pool2d, 3: torch._C._nn.avg_pool3d}
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_LP = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}
# Maxima of integers are computed in a float dtype that represents all values exactly.
_EXACT_IN = {
    torch.uint8: torch.float32,
    torch.int8: torch.float32,
    torch.int16: torch.float32,
    torch.int32: torch.float64,
}


def avg_pool(
    dims: int,
    input: ShardedTensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ShardedTensor:
    """Computes average pooling; padding counts as in torch."""
    if input.dim() == dims + 1:
        tail = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return unbatched(avg_pool(dims, batched(input), *tail))
    function = _AVG[dims]
    refuse_integers(function, input)
    if divisor_override == 0:
        raise refusal(function, (input,), {}, "a divisor of 0")
    input = widened(function, dims, input)
    input, window, plan = _plan(function, dims, input, kernel_size, stride, padding, 1, ceil_mode)
    pads = as_tuple(padding, dims)
    average_plan = _average_plan(plan, window, pads, count_include_pad, divisor_override)
    shard = average_pool_of_relu(input, average_plan)
    if shard is None:
        shard = average(local_of(input), average_plan)
    return wrap_new(shard, plan.out, input)


def max_pool(
    dims: int,
    input: ShardedTensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> ShardedTensor | Pair:
    """Computes maximum pooling; the first of equal values in a window gets the gradient.

    Indices are as in torch: positions in the flattened spatial dims of the global input.
    """
    if input.dim() == dims + 1:
        tail = (kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        return unbatched(max_pool(dims, batched(input), *tail))
    function, given = _MAX[dims], input.dtype
    if not given.is_floating_point:
        if given not in _EXACT_IN or dims == 1:
            refuse_integers(function, input)
        input = elementwise(torch.Tensor.to, input, _EXACT_IN[given])
    input = widened(function, dims, input, None, 0, 1, False, return_indices)
    input, window, plan = _plan(
        function, dims, input, kernel_size, stride, padding, dilation, ceil_mode
    )
    max_plan = _max_plan(function, input, plan, window)
    y, taps = maximum(local_of(input), max_plan)
    result = wrap_new(y if given.is_floating_point else y.to(given), plan.out, input)
    if not return_indices:
        return result
    return result, wrap(max_plan.indices(taps), plan.out, input)


def lp_pool(
    dims: int,
    input: ShardedTensor,
    norm_type: float,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    ceil_mode: bool = False,
) -> ShardedTensor:
    """Computes power-average pooling, composed as in torch."""
    x: Any = input  # calls on it give sharded tensors
    tail: Any = (kernel_size, stride, 0, 1, ceil_mode)
    if norm_type == math.inf:
        return max_pool(dims, x.abs(), *tail)  # type: ignore[return-value]  # no indices asked
    if norm_type == -math.inf:
        return -max_pool(dims, -x.abs(), *tail)  # type: ignore[return-value,operator]  # as above
    mean: Any = avg_pool(dims, x.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    volume = math.prod(as_tuple(kernel_size, dims))
    powers = (mean.sign() * F.relu(mean.abs())).mul(volume)
    return powers.pow(1 / norm_type)


def _plan(
    function: Callable[..., Any],
    dims: int,
    x: ShardedTensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
) -> tuple[ShardedTensor, Window, WindowPlan]:
    if x.dim() != dims + 2:
        raise refusal(function, (x,), {}, f"expected [N, C] and {dims} spatial dims")
    given, shape = x.layout, x.layout.shape
    sizes = as_keys(dims, kernel_size, stride, padding, dilation)

    def make() -> tuple[Window, Layout]:
        size, step, pad, dilated = sizes
        kernel, pads = as_tuple(size, dims), as_tuple(pad, dims)
        # In torch a missing or empty stride means the kernel size.
        steps = kernel if step is None or step == () else as_tuple(step, dims)
        if any(p < 0 or 2 * p > k for p, k in zip(pads, kernel, strict=True)):
            why = f"padding {pads} is negative or more than half of kernel {kernel}"
            raise refusal(function, (x,), {}, why)
        window = Window(kernel, steps, as_tuple(dilated, dims), symmetric(pads))
        if ceil_mode:
            window = window.with_ceil(shape[2:])
        return window, coarsen_if_faster(given, pool_workload(window, shape[1]))

    key = ("window of pool", given, sizes, ceil_mode)
    window, layout = given.mesh.session.plan(key, make)
    if layout != given:  # else the shard is not needed yet
        x = redistribute(x, layout)
    return x, window, plan_window(layout, window, shape[1], layout.splits[1])


def _average_plan(
    plan: WindowPlan,
    window: Window,
    padding: Sequence[int],
    include_padding: bool,
    divisor: int | None,
) -> AveragePlan:
    key = ("average", plan.layout, window, tuple(padding), include_padding, divisor)

    def make() -> AveragePlan:
        scales = []
        for dim, (kernel, step, pad) in enumerate(
            zip(window.kernel, window.stride, padding, strict=True)
        ):
            extent = plan.layout.shape[dim + 2]
            start = torch.arange(plan.out.shape[dim + 2]) * step - pad
            stop = (start + kernel).clamp(max=extent + pad)
            if not include_padding:
                start, stop = start.clamp(min=0), stop.clamp(max=extent)
            scales.append((stop - start).double().reciprocal())
        if divisor is not None:
            scales = [torch.ones_like(scale) for scale in scales]
            scales[0] /= divisor
        for scale in scales[1:]:
            # Constant factors are moved into the first dim: factors of 1 cost the kernel nothing.
            if scale.numel() and bool((scale == scale[0]).all()):
                scales[0] = scales[0] * scale[0]
                scale.fill_(1)
        return AveragePlan(Averaging(window, scales), plan)

    return plan.layout.mesh.session.plan(key, make)


def _max_plan(
    function: Callable[..., Any], x: ShardedTensor, plan: WindowPlan, window: Window
) -> MaxPlan:
    def make() -> MaxPlan:
        for dim, (kernel, step, dilation, (pad, _)) in enumerate(
            zip(window.kernel, window.stride, window.dilation, window.padding, strict=True), start=2
        ):
            first = torch.arange(plan.out.shape[dim]).view(-1, 1) * step - pad
            taps = first + torch.arange(kernel) * dilation
            if not bool(((taps >= 0) & (taps < x.shape[dim])).any(1).all()):
                raise refusal(function, (x,), {}, f"some windows along dim {dim} hold no input")
        return MaxPlan(plan)

    return x.mesh.session.plan(("maximum", plan.layout, window), make)


def _register() -> None:
    for dims in (1, 2, 3):
        HANDLERS[_AVG[dims]] = partial(avg_pool, dims)
        HANDLERS[_LP[dims]] = partial(lp_pool, dims)
        handler: Any = partial(max_pool, dims)
        HANDLERS[_MAX[dims]] = HANDLERS[getattr(torch, f"max_pool{dims}d")] = handler
        pair = partial(with_indices, handler, 6)
        HANDLERS[getattr(F, f"max_pool{dims}d_with_indices")] = pair
        if dims == 1:
            HANDLERS[torch.max_pool1d_with_indices] = pair


_register()
