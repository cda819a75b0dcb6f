"""Average and maximum pooling of sharded tensors, overlapping windows included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.ops.average import AveragePlan, Averaging, average
from pydist.ops.placement import choose_layout, pool_work
from pydist.ops.redistribute import redistribute
from pydist.ops.reduce import reduce_amax, reduce_mean
from pydist.ops.windows import Window, WindowPlan, as_tuple, plan_window, symmetric
from pydist.partition import Box
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal, wrap

_AVG = {1: torch.avg_pool1d, 2: torch._C._nn.avg_pool2d, 3: torch._C._nn.avg_pool3d}
_NARROW = (torch.float16, torch.bfloat16)
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


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
    """Average pooling; padding counts as torch counts it."""
    input, window, plan = _plan(_AVG[dims], dims, input, kernel_size, stride, padding, 1, ceil_mode)
    local = local_of(input)
    if dims == 3 and torch.is_autocast_enabled(local.device.type) and local.dtype in _NARROW:
        local = local.float()  # autocast's rule for torch's own call
    pads = as_tuple(padding, dims)
    average_plan = _average_plan(plan, window, pads, count_include_pad, divisor_override)
    return wrap(average(local, average_plan), plan.out, input)


def max_pool(
    dims: int,
    input: ShardedTensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> ShardedTensor:
    """Maximum pooling; of equal values the first in the window gets the gradient."""
    function = _MAX[dims]
    if return_indices:
        raise refusal(function, (input,), {}, "return_indices")
    input, window, plan = _plan(
        function, dims, input, kernel_size, stride, padding, dilation, ceil_mode
    )
    if plan.is_whole:
        padding = as_tuple(padding, dims)
        local = function(
            local_of(input), window.kernel, window.stride, padding, window.dilation, ceil_mode
        )
        return wrap(local, plan.out, input)

    if not any(plan.halos):  # as under 2/2 on even cuts
        return wrap(_on_shard(function, local_of(input), plan, window), plan.out, input)

    def without_padding(padded: Tensor) -> Tensor:
        return function(padded, window.kernel, window.stride, 0, window.dilation)

    return wrap(plan.apply(without_padding, input, fill=-math.inf), plan.out, input)


def _on_shard(
    function: Callable[..., Tensor], x: Tensor, plan: WindowPlan, window: Window
) -> Tensor:
    """Maximum pooling that needs no halo: torch's own call on the shard, mostly without a copy.

    A rank without outputs computes one window and keeps none of it, as in `WindowPlan.apply`.
    """
    own, out = plan.layout.box, plan.out.box
    beyond: list[int] = []
    padding: list[int] = []
    for dim in reversed(range(len(window.kernel))):
        extent, count = own.shape[dim + 2], out.shape[dim + 2]
        reach = window.dilation[dim] * (window.kernel[dim] - 1) + 1
        if out.empty:
            lo, hi, within = 0, max(0, reach - extent), 0
        else:
            before = _elements_before(window, dim, own, out)
            lo, hi, within = _fit_windows(extent, reach, window.stride[dim], before, count)
        if within > window.kernel[dim] // 2:  # torch's bound, whatever the dilation
            lo, hi, within = within, (count - 1) * window.stride[dim] + reach - within - extent, 0
        beyond += [lo, hi]
        padding.insert(0, within)
    if any(beyond):
        x = F.pad(x, beyond, value=-math.inf)
    pooled = function(x, window.kernel, window.stride, padding, window.dilation)
    if not out.empty:
        return pooled
    return pooled[tuple(slice(n) for n in plan.out.local_shape)].reshape(plan.out.local_shape)


def adaptive_pool(
    dims: int,
    function: Callable[..., Tensor],
    input: ShardedTensor,
    output_size: int | Sequence[int | None],
    return_indices: bool = False,
) -> ShardedTensor:
    """Adaptive pooling to one voxel, or where the output divides the input."""
    sizes = (output_size,) * dims if isinstance(output_size, int) else tuple(output_size)
    extents = tuple(input.shape[2:])
    out = tuple(n if s is None else s for s, n in zip(sizes, extents, strict=True))
    average = "avg" in function.__name__
    if return_indices:
        raise refusal(function, (input,), {}, "return_indices")
    if all(s == 1 for s in out):
        over = tuple(range(2, dims + 2))
        return (reduce_mean if average else reduce_amax)(input, over, keepdim=True)
    if any(n % s for n, s in zip(extents, out, strict=True)):
        raise refusal(function, (input,), {}, f"{out} does not divide the extents {extents}")
    kernel = tuple(n // s for n, s in zip(extents, out, strict=True))
    return (avg_pool if average else max_pool)(dims, input, kernel)


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
    kernel = as_tuple(kernel_size, dims)
    # torch takes no stride, or an empty one, for "as the kernel".
    steps = kernel if stride is None or stride in ((), []) else as_tuple(stride, dims)
    pads = as_tuple(padding, dims)
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise refusal(function, (x,), {}, f"padding {pads} is more than half of kernel {kernel}")
    window = Window(kernel, steps, as_tuple(dilation, dims), symmetric(pads))
    if ceil_mode:
        window = window.with_ceil(x.shape[2:])
    x = redistribute(x, choose_layout(x._layout, pool_work(window, x.shape[1])))
    return x, window, plan_window(x._layout, window, x.shape[1])


def _average_plan(
    plan: WindowPlan,
    window: Window,
    padding: Sequence[int],
    include_padding: bool,
    divisor: int | None,
) -> AveragePlan:
    key = ("average", plan.layout, window, tuple(padding), include_padding, divisor)
    plans = plan.layout.mesh.plans
    if key not in plans:
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
            # What is the same for all outputs goes into one factor: ones cost the kernel nothing.
            if scale.numel() and bool((scale == scale[0]).all()):
                scales[0] = scales[0] * scale[0]
                scale.fill_(1)
        plans[key] = AveragePlan(Averaging(window, scales), plan)
    return plans[key]


def _elements_before(window: Window, dim: int, inputs: Box, outputs: Box) -> int:
    """How many elements of the first output's window lie before the inputs."""
    before, _ = window.padding[dim]
    return inputs.lo[dim + 2] + before - outputs.lo[dim + 2] * window.stride[dim]


def _fit_windows(
    extent: int, reach: int, stride: int, before: int, count: int
) -> tuple[int, int, int]:
    """How to get `count` windows, the first of them with `before` elements before the extent.

    Returns:
        Elements to add before and after (negative: to leave out), and torch's padding on top.
    """
    after = (count - 1) * stride + reach - before - extent
    if 0 <= before <= reach // 2:
        if 0 <= before - after < stride:
            return 0, 0, before
        if after < 0 and before < stride:
            return 0, after, before
    return before, after, 0


def _register() -> None:
    for dims in (1, 2, 3):
        HANDLERS[_AVG[dims]] = partial(avg_pool, dims)
        HANDLERS[_MAX[dims]] = partial(max_pool, dims)
        for name in (f"adaptive_avg_pool{dims}d", f"adaptive_max_pool{dims}d"):
            function = getattr(F, name)
            HANDLERS[function] = partial(adaptive_pool, dims, function)
    HANDLERS[torch.adaptive_avg_pool1d] = partial(adaptive_pool, 1, F.adaptive_avg_pool1d)


_register()
