"""Batch norm of sharded tensors, with the statistics that one device would see.

One exchange in forward: every rank's count, mean and squared deviations a channel. One in backward:
Σ dy and Σ dy (x - mean). A step reads x four times from memory (statistics, result, sums, dL/dx)
and dL/dy twice; nothing of the size of an activation is made but the two results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pydist.comm.adjoints import begin_backward, enter, sum_ranks
from pydist.comm.transport import Transport
from pydist.errors import UsageError
from pydist.layout import Layout
from pydist.mesh import Mesh
from pydist.ops.local_conv import differentiable
from pydist.ops.redistribute import parameter_for
from pydist.ops.statistics import (
    Moments,
    combined,
    gradient_sums,
    merged,
    moments,
    per_channel,
    statistics_dtype,
    unpacked,
)
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap

STATISTICS = ("global", "group", "rank")


@implements(F.batch_norm)
def batch_norm(
    input: ShardedTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardedTensor:
    """Batch norm over all voxels and samples of a channel.

    The statistics span all ranks ("global": all sample groups too, as on one device with the
    whole batch), the sample group ("group"), or this rank alone ("rank").
    """
    local, layout = local_of(input), input._layout
    if layout.splits[1] is not None:
        raise refusal(F.batch_norm, (input,), {}, "the channels are split")
    scale, shift = parameter_for(weight, layout), parameter_for(bias, layout)
    if not training:
        return wrap(
            _evaluate(local, running_mean, running_var, scale, shift, eps, layout), layout, input
        )
    over = input._origin.statistics
    tracked = running_mean is not None and running_var is not None
    with torch.no_grad():
        own, everyones = _statistics(local, layout, over, tracked)
        count = round(float(own.n))
        if count == 1:
            raise UsageError(
                "batch norm in training needs more than one value a channel, but the input is "
                f"{layout.shape}"
            )
        if running_mean is not None and running_var is not None:
            mean, var = _averaged(everyones)
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(var.to(running_var.dtype), momentum)
    call = _Call(layout, over, eps, max(1, count))
    normed = _BatchNorm.apply(local, scale, shift, own.mean, own.m2 / call.count, call)
    return wrap(normed, layout, input)


def _evaluate(
    local: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    layout: Layout,
) -> Tensor:
    """Batch norm with given statistics."""
    if mean is None or var is None or not any(box.empty for box in layout.boxes):
        return F.batch_norm(local, mean, var, scale, shift, False, 0.0, eps)
    # torch's own call gives an empty rank gradients without a graph: the others would wait for it
    # in a second backward.
    out = (local - per_channel(mean, local)) * per_channel(torch.rsqrt(var + eps), local)
    return _affine(out, scale, shift)


def _affine(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is not None:
        x = x * per_channel(scale, x)
    return x if shift is None else x + per_channel(shift, x)


# -- statistics -----------------------------------------------------------------------------


def _statistics(local: Tensor, layout: Layout, over: str, tracked: bool) -> tuple[Moments, Moments]:
    """The statistics that this rank uses, and [k, ...] all that are in use on any rank.

    The latter are needed for running statistics only. They travel in the same exchange: the
    running statistics then are equal on all ranks at any time, so that evaluation and checkpoints
    need not ask when they were last averaged.
    """
    mesh = layout.mesh
    row = moments(local).packed()
    if over == "global" or not tracked:
        own = merged(_gathered(row, mesh.group(_axes(layout, over)), mesh))
        return own, unpacked(own.packed().unsqueeze(0))
    if over == "rank":
        return unpacked(row), unpacked(_gathered(row, mesh.world, mesh))
    own, channels = unpacked(row), local.shape[1]
    # Of equal copies each counts for its part.
    weighed = Moments(own.n / layout.replicas, own.mean, own.m2 / layout.replicas)
    rows = _gathered(weighed.packed(), mesh.world, mesh)
    groups = merged(rows.view(mesh.data_size, mesh.sample_size, 1 + 2 * channels).transpose(0, 1))
    return Moments(*(part[mesh.data_index] for part in groups)), groups


def _gathered(row: Tensor, group: Transport, mesh: Mesh) -> Tensor:
    """The rows of all ranks of a group, [size, ...]."""
    if group.size == 1:
        return row.unsqueeze(0)
    with mesh.timers.measure("statistics"):
        return group.all_gather(row)


def _averaged(statistics: Moments) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance, averaged over the statistics [k, ...] that are not of nothing."""
    var = statistics.m2 / (statistics.n - 1).clamp(min=1)
    used = (statistics.n > 0).to(var.dtype)
    share = used / used.sum().clamp(min=1)
    return (statistics.mean * share).sum(0), (var * share).sum(0)


def _axes(layout: Layout, over: str) -> tuple[str, ...]:
    if over == "rank":
        return ()
    return ("data", *layout.used_axes) if over == "global" else layout.used_axes


# -- the function and its derivatives -------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What one batch norm is over: `count` values a channel behind its statistics."""

    layout: Layout
    over: str
    eps: float
    count: int


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor,
        var: Tensor,
        call: _Call,
    ) -> Tensor:
        ctx.call, ctx.layer = call, call.layout.mesh.timers.layer
        # These are the exchange's marker for checkpointing too, on empty ranks as well.
        ctx.save_for_backward(x, scale, shift, mean, var)
        if not x.numel():
            return torch.empty_like(x)
        dtype = statistics_dtype(x.dtype)
        scale, shift = (None if t is None else t.to(dtype) for t in (scale, shift))
        return F.batch_norm(x, mean.to(dtype), var.to(dtype), scale, shift, False, 0.0, call.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, mean, var = ctx.saved_tensors
        call: _Call = ctx.call
        mesh = call.layout.mesh
        begin_backward(mesh)
        for_x, for_scale, for_shift, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return (*_by_composition(ctx, x, scale, shift, grad), None, None, None)
        dtype = statistics_dtype(x.dtype)
        inverse = torch.rsqrt(var + call.eps)
        sums = gradient_sums(grad, x, mean.to(dtype))
        grad_shift = sums[0].to(shift.dtype) if for_shift else None
        grad_scale = (sums[1] * inverse).to(scale.dtype) if for_scale else None
        if not for_x:
            return None, grad_scale, grad_shift, None, None, None
        group = mesh.group(_axes(call.layout, call.over))
        if group.size > 1:
            sums = sums.clone()  # the parameters' gradients, this rank's part, may be views of it
            with mesh.timers.measure("statistics", ctx.layer):
                group.all_reduce(sums)
        # dx = scale inverse (dy - mean of dy - normed · mean of dy normed), written a dy + b x + c.
        a = inverse if scale is None else inverse * scale.double()
        b = -a * inverse.square() * sums[1] / call.count
        c = -a * sums[0] / call.count - b * mean
        grad_x = combined(grad, x, a.to(dtype), b.to(dtype), c.to(dtype))
        return grad_x, grad_scale, grad_shift, None, None, None


def _by_composition(
    ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, grad: Tensor
) -> list[Tensor | None]:
    """Gradients with a graph of their own: recomputes by composition, and differentiates that."""
    # Views: scale and shift may be computed from x, or shared with a layer before it.
    x = x.view_as(x)
    scale = None if scale is None else scale.view_as(scale)
    shift = None if shift is None else shift.view_as(shift)
    y = _affine(_composed(x, ctx.call), scale, shift).to(x.dtype)
    return differentiable(y, (x, scale, shift), ctx.needs_input_grad, grad)


def _composed(x: Tensor, call: _Call) -> Tensor:
    """(x - mean) / sqrt(var + eps), with all of it in the graph, for second derivatives."""
    layout, mesh = call.layout, call.layout.mesh
    axes = _axes(layout, call.over)
    copies = 1.0
    if call.over != "rank":
        # The statistics are replicated over the sample group, the shard `replicas` times.
        copies = mesh.sample_size / layout.replicas
    dims = [d for d in range(x.dim()) if d != 1]
    x = x.to(statistics_dtype(x.dtype))
    mean = sum_ranks(x.sum(dims), mesh, axes) / call.count
    centred = x - per_channel(enter(mean, copies), x)
    var = sum_ranks((centred * centred).sum(dims), mesh, axes) / call.count
    inverse = enter(torch.rsqrt(var + call.eps), copies)
    return centred * per_channel(inverse, x)
