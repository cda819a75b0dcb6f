"""Pools adaptively to a given number of outputs, over windows of almost equal length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.comm import Transport
from pydist.exchange.adjoints import all_reduce_sum
from pydist.layout import Layout
from pydist.ops.coarsening import coarsen_if_faster, pool_workload
from pydist.ops.pool.average import AveragePlan, Averaging, average
from pydist.ops.pool.maximum import MaxPlan, maximum, values_at_taps
from pydist.ops.pool.pool_plan import (
    Pair,
    batched,
    refuse_integers,
    unbatched,
    widened,
    with_indices,
)
from pydist.ops.reduction.reduce import axes_of, reduce_mean
from pydist.ops.windows import Window, WindowPlan, plan_window
from pydist.partition import Footprint
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal, wrap
from pydist.tensor.operands import redistribute


@dataclass(frozen=True)
class AdaptiveWindow(Window):
    """Windows that adaptive pooling from `inputs` to `outputs` uses, for all spatial dims."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(inputs: Sequence[int], outputs: Sequence[int]) -> AdaptiveWindow:
        """Makes the windows for the extents of the inputs and of the outputs."""
        footprints = [Footprint.adaptive(n, m) for n, m in zip(inputs, outputs, strict=True)]
        return AdaptiveWindow(
            tuple(f.kernel for f in footprints),
            tuple(f.stride for f in footprints),
            (1,) * len(footprints),
            ((0, 0),) * len(footprints),
            tuple(inputs),
            tuple(outputs),
        )

    def footprint(self, dim: int) -> Footprint:
        """Returns the footprint along one spatial dim."""
        return Footprint.adaptive(self.inputs[dim], self.outputs[dim])


def adaptive_avg_pool(
    dims: int,
    function: Callable[..., Any],
    input: ShardedTensor,
    output_size: int | Sequence[int | None],
) -> ShardedTensor:
    """Computes adaptive average pooling to any size."""
    if input.dim() == dims + 1:
        return unbatched(adaptive_avg_pool(dims, function, batched(input), output_size))
    refuse_integers(function, input)
    outputs = _outputs(function, dims, input, output_size)
    return adaptive_average(widened(function, dims, input), outputs)


def adaptive_max_pool(
    dims: int,
    function: Callable[..., Any],
    input: ShardedTensor,
    output_size: int | Sequence[int | None],
    return_indices: bool = False,
) -> ShardedTensor | Pair:
    """Computes adaptive maximum pooling to any size; indices are as in `max_pool`."""
    if input.dim() == dims + 1:
        return unbatched(
            adaptive_max_pool(dims, function, batched(input), output_size, return_indices)
        )
    refuse_integers(function, input)
    outputs = _outputs(function, dims, input, output_size)
    result, taps, plan = adaptive_maximum(widened(function, dims, input, return_indices), outputs)
    return (result, wrap(plan.indices(taps), result.layout, input)) if return_indices else result


def _outputs(
    function: Callable[..., Any], dims: int, x: ShardedTensor, size: int | Sequence[int | None]
) -> tuple[int, ...]:
    if x.dim() != dims + 2:
        raise refusal(function, (x,), {}, f"expected [N, C] and {dims} spatial dims")
    sizes = (size,) * dims if size is None or isinstance(size, int) else tuple(size)
    if len(sizes) == 1:
        sizes *= dims
    return tuple(n if s is None else s for s, n in zip(sizes, x.shape[2:], strict=True))


def adaptive_average(x: ShardedTensor, outputs: Sequence[int]) -> ShardedTensor:
    """Computes means over windows; a dim with one output is replicated on every rank."""
    single = tuple(d for d, m in enumerate(outputs, start=2) if m == 1)
    if single:
        x = reduce_mean(x, single, keepdim=True)
    if len(single) == len(outputs):
        return x
    window = AdaptiveWindow.of(tuple(x.shape[2:]), outputs)
    x = redistribute(x, coarsen_if_faster(x.layout, pool_workload(window, x.shape[1])))
    plan = plan_window(x.layout, window, x.shape[1], x.layout.splits[1])
    key = ("adaptive average", x.layout, window)

    def make() -> AveragePlan:
        scales = [_reciprocal_lengths(window.footprint(d)) for d in range(len(outputs))]
        return AveragePlan(Averaging(window, scales), plan)

    return wrap(average(local_of(x), x.mesh.session.plan(key, make)), plan.out, x)


def _reciprocal_lengths(footprint: Footprint) -> Tensor:
    intervals = [footprint.needs(o, o + 1) for o in range(footprint.outputs)]
    return torch.tensor([1 / (hi - lo) for lo, hi in intervals], dtype=torch.float64)


def adaptive_maximum(
    x: ShardedTensor, outputs: Sequence[int]
) -> tuple[ShardedTensor, Tensor, MaxPlan]:
    """Computes maxima over windows, the shard of their taps, and the plan that reads the taps."""
    window = AdaptiveWindow.of(tuple(x.shape[2:]), outputs)
    cut = [d for d in range(2, x.dim()) if x.layout.splits[d] is not None]
    if cut and all(outputs[d - 2] == 1 for d in cut):
        return _of_all_ranks(x, window, cut)
    x = redistribute(x, coarsen_if_faster(x.layout, pool_workload(window, x.shape[1])))
    plan = _max_plan(x.layout, window)
    y, taps = maximum(local_of(x), plan)
    return wrap(y, plan.plan.out, x), taps, plan


def _of_all_ranks(
    x: ShardedTensor, window: AdaptiveWindow, cut: Sequence[int]
) -> tuple[ShardedTensor, Tensor, MaxPlan]:
    """Computes global maxima along split dims: maxima of the shards, compared over the ranks."""
    layout = x.layout
    plan = _max_plan(layout, window, cut)
    local, axes = local_of(x), axes_of(layout, cut)
    with torch.no_grad():
        y, taps = plan.maxima(local)
        with x.mesh.session.timers.measure("statistics"):
            taps = _first_maximum(y, taps, x.mesh.group(axes))
    total = all_reduce_sum(values_at_taps(local, taps, plan), x.mesh, axes)
    return wrap(total, plan.plan.out, x), taps, plan


def _first_maximum(values: Tensor, taps: Tensor, group: Transport) -> Tensor:
    """Returns the taps of the maxima over all ranks: the last NaN, else the first of ties."""
    every_value = group.all_gather(values.contiguous())
    every_tap = group.all_gather(taps.contiguous()).long()
    is_nan = every_value.isnan()
    none = torch.iinfo(torch.int64).max
    of_nan = torch.where(is_nan, every_tap, -1).amax(0)
    largest = torch.where(is_nan, -math.inf, every_value).amax(0)
    of_value = torch.where(every_value == largest, every_tap, none).amin(0)
    return torch.where(of_nan >= 0, of_nan, of_value).to(taps.dtype)


def _max_plan(layout: Layout, window: AdaptiveWindow, whole: Sequence[int] = ()) -> MaxPlan:
    """Returns the cached plan for a layout; outputs are replicated along dims in `whole`."""

    def make() -> MaxPlan:
        plan = plan_window(layout, window, layout.shape[1], layout.splits[1])
        if whole:
            out = plan.out.replace(changes=dict.fromkeys(whole))
            plan = WindowPlan(layout, window, layout.shape[1], out=out)
        return MaxPlan(plan, alone=bool(whole))

    return layout.mesh.session.plan(("adaptive maximum", layout, window), make)


def _register() -> None:
    averages: Any = (torch.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
    for dims, function in enumerate(averages, start=1):
        HANDLERS[function] = partial(adaptive_avg_pool, dims, function)
        largest = getattr(F, f"adaptive_max_pool{dims}d")
        HANDLERS[largest] = handler = partial(adaptive_max_pool, dims, largest)
        pair = partial(with_indices, handler, 2)
        HANDLERS[getattr(F, f"adaptive_max_pool{dims}d_with_indices")] = pair
        if dims == 1:
            HANDLERS[torch.adaptive_max_pool1d] = pair


_register()
