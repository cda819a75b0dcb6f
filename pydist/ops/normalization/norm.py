"""Normalisation by statistics of values that lie on several ranks: what all norms share.

One exchange in forward: every rank's mean and squared deviations; their counts follow from the
layout. One in backward: Σ dy and Σ dy (x - mean), under way while the parameters' gradients are
formed. A step reads x four times from memory (statistics, result, sums, dL/dx) and dL/dy twice;
nothing of the size of an activation is made but the two results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydist.comm.adjoints import begin_backward, enter, sum_ranks
from pydist.ops.convolution.local_conv import differentiable
from pydist.ops.normalization.norm_plan import NormPlan
from pydist.ops.normalization.statistics import (
    Moments,
    combine,
    gradient_sums,
    per_channel,
    statistics_dtype,
    strided_like,
)

_evaluated = torch.ops.aten.native_batch_norm.out


@dataclass(frozen=True)
class _Call:
    plan: NormPlan
    eps: float
    centred: bool


def normalize(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    statistics: Moments,
    plan: NormPlan,
    eps: float,
    centred: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) · scale + shift, differentiable twice.

    Args:
        x: dense, [N, C, ...], may be empty; its memory format is that of the result.
        scale: [C] or `None`.
        shift: [C] or `None`.
        statistics: of `x`, over all ranks of the plan.
        plan: of the statistics.
        eps: added to the variance.
        centred: whether the mean is taken off; if not, the mean of squares takes the variance's
            place.
    """
    n, mean, m2 = statistics
    if not centred:
        mean, m2 = torch.zeros_like(mean), m2 + n * mean.square()
    n = n.clamp(min=1)
    return _Normalize.apply(x, scale, shift, n, mean, m2 / n, _Call(plan, eps, centred))


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        n: Tensor,
        mean: Tensor,
        var: Tensor,
        call: _Call,
    ) -> Tensor:
        plan = call.plan
        ctx.call, ctx.layer = call, plan.mesh.timers.layer
        # These are the exchange's marker for checkpointing too, on empty ranks as well.
        ctx.save_for_backward(x, scale, shift, n, mean, var)
        out = torch.empty_like(x)
        if not x.numel():
            return out
        affine = (None if t is None else plan.of_samples(t, x) for t in (scale, shift))
        values = (*affine, plan.of_rows(mean), plan.of_rows(var))
        for sheet, target, *row_values in _by_sheets(plan, (x, out), values):
            unused = row_values[-1].new_empty(0)
            _evaluated(
                sheet, *row_values, False, 0.0, call.eps,
                out=target, save_mean=unused, save_invstd=unused,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, n, mean, var = ctx.saved_tensors
        call: _Call = ctx.call
        plan, mesh = call.plan, call.plan.mesh
        begin_backward(mesh)
        for_x, for_scale, for_shift, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return (*_by_composition(ctx, x, scale, shift, n, grad), None, None, None, None)
        grad = strided_like(grad, x)
        parts = _by_sheets(plan, (grad, x), (plan.of_rows(mean),))
        sums = torch.cat([gradient_sums(*each) for each in parts], 1)
        # There the mean is rounded; far from zero that counts.
        rest = mean - mean.to(statistics_dtype(x.dtype)).double()
        sums[1] -= sums[0] * plan.of_rows(rest)
        factor = None if scale is None else plan.of_samples(scale.double(), x)
        if for_x:
            totals = sums if factor is None else sums * factor
            totals = totals.view(2, -1, plan.members).sum(-1)
            if plan.group.size > 1:
                with mesh.timers.measure("statistics", ctx.layer):
                    work = plan.group.all_reduce_async(totals)
        inverse = torch.rsqrt(var + call.eps)
        a = plan.of_rows(inverse)
        grad_shift = plan.over_samples(sums[0], x).to(shift.dtype) if for_shift else None
        grad_scale = plan.over_samples(sums[1] * a, x).to(scale.dtype) if for_scale else None
        if not for_x:
            return None, grad_scale, grad_shift, None, None, None, None
        # With g = scale · dy: dx = inverse (g - mean of g - normed · mean of g normed), which is
        # a dy + b x + c.
        a = a if factor is None else a * factor
        grad_x = torch.empty_like(x)
        if plan.group.size > 1:
            with mesh.timers.measure("statistics", ctx.layer):
                work.wait()
        b = -inverse.pow(3) * totals[1] / n
        c = -inverse * totals[0] / n - b * mean if call.centred else torch.zeros_like(b)
        values = (a, plan.of_rows(b), plan.of_rows(c))
        for g, sheet, target, *row_values in _by_sheets(plan, (grad, x, grad_x), values):
            combine(target, g, sheet, *row_values)
        return grad_x, grad_scale, grad_shift, None, None, None, None


def _by_sheets(
    plan: NormPlan, tensors: Sequence[Tensor], values: Sequence[Tensor | None]
) -> Iterator[tuple[Any, ...]]:
    """Sheets of dense tensors of equal strides, and alike of values [R], in the dtype for them."""
    sheets = list(zip(*(plan.sheets(t) for t in tensors), strict=True))
    dtype, rows = statistics_dtype(tensors[0].dtype), sheets[0][0].shape[1]
    given = [None if v is None else v.to(dtype) for v in values]
    if len(sheets) == 1:
        yield (*sheets[0], *given)
        return
    of_sheets = [[None] * len(sheets) if v is None else v.split(rows) for v in given]
    for sheet, *row_values in zip(sheets, *of_sheets, strict=True):
        yield (*sheet, *row_values)


def _by_composition(
    ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, n: Tensor, grad: Tensor
) -> list[Tensor | None]:
    """Gradients with a graph of their own: recomputes by composition, and differentiates that."""
    # Views: scale and shift may be computed from x, or shared with a layer before it.
    x = x.view_as(x)
    scale = None if scale is None else scale.view_as(scale)
    shift = None if shift is None else shift.view_as(shift)
    y = _composed(x, n, ctx.call)
    if scale is not None:
        y = y * per_channel(scale, y)
    if shift is not None:
        y = y + per_channel(shift, y)
    return differentiable(y.to(x.dtype), (x, scale, shift), ctx.needs_input_grad, grad)


def _composed(x: Tensor, n: Tensor, call: _Call) -> Tensor:
    """(x - mean) / sqrt(var + eps), with all of it in the graph, for second derivatives."""
    plan = call.plan
    samples, channels, members = *x.shape[:2], plan.members
    voxels = x[:1, :1].numel()
    values = x.to(statistics_dtype(x.dtype)).reshape(samples, channels // members, members, voxels)
    over = (2, 3) if plan.per_sample else (0, 2, 3)
    # Of the ranks that hold the statistics, each has its part of what depends on them.
    copies = len(plan.counts)
    n = n.to(values.dtype)

    def mean_of(t: Tensor) -> Tensor:
        return sum_ranks(t.sum(over, keepdim=True), plan.mesh, plan.axes) / n

    if call.centred:
        values = values - enter(mean_of(values), copies)
    inverse = torch.rsqrt(mean_of(values * values) + call.eps)
    return (values * enter(inverse, copies)).reshape(x.shape)
