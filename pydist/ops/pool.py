"""Average and maximum pooling of sharded tensors, overlapping windows included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.ops.placement import choose_layout, pool_work
from pydist.ops.redistribute import redistribute
from pydist.ops.reduce import reduce_amax, reduce_mean
from pydist.ops.windows import Window, WindowPlan, as_tuple, plan_window, symmetric
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal, wrap

_AVG = {1: torch.avg_pool1d, 2: torch._C._nn.avg_pool2d, 3: torch._C._nn.avg_pool3d}
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
    if plan.is_whole:
        options: dict[str, Any] = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
        if dims > 1:
            options["divisor_override"] = divisor_override
        local = _AVG[dims](
            local_of(input), window.kernel, window.stride, as_tuple(padding, dims), **options
        )
        return wrap(local, plan.out, input)
    mean = plan.apply(lambda padded: _AVG[dims](padded, window.kernel, window.stride), input)
    size = math.prod(window.kernel)
    if divisor_override is not None:
        return wrap(mean * (size / divisor_override), plan.out, input)
    counts = _counts(plan, window, as_tuple(padding, dims), count_include_pad)
    if all(bool((c == k).all()) for c, k in zip(counts, window.kernel, strict=True)):
        return wrap(mean, plan.out, input)
    for dim, count in enumerate(counts):
        shape = [1] * mean.dim()
        shape[dim + 2] = -1
        factor = window.kernel[dim] / count.to(mean.device, torch.float64)
        mean = mean * factor.to(mean.dtype).view(shape)
    return wrap(mean, plan.out, input)


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

    def without_padding(padded: Tensor) -> Tensor:
        return function(padded, window.kernel, window.stride, 0, window.dilation)

    return wrap(plan.apply(without_padding, input, fill=-math.inf), plan.out, input)


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


def _counts(
    plan: WindowPlan, window: Window, padding: Sequence[int], include_padding: bool
) -> list[Tensor]:
    """By how many voxels torch divides, along each dim, for this rank's outputs."""
    counts = []
    for dim, (kernel, step, pad) in enumerate(
        zip(window.kernel, window.stride, padding, strict=True)
    ):
        extent = plan.layout.shape[dim + 2]
        start = torch.arange(plan.out.box.lo[dim + 2], plan.out.box.hi[dim + 2]) * step - pad
        stop = (start + kernel).clamp(max=extent + pad)
        if not include_padding:
            start, stop = start.clamp(min=0), stop.clamp(max=extent)
        counts.append(stop - start)
    return counts


def _register() -> None:
    for dims in (1, 2, 3):
        HANDLERS[_AVG[dims]] = partial(avg_pool, dims)
        HANDLERS[_MAX[dims]] = partial(max_pool, dims)
        for name in (f"adaptive_avg_pool{dims}d", f"adaptive_max_pool{dims}d"):
            function = getattr(F, name)
            HANDLERS[function] = partial(adaptive_pool, dims, function)
    HANDLERS[torch.adaptive_avg_pool1d] = partial(adaptive_pool, 1, F.adaptive_avg_pool1d)


_register()
