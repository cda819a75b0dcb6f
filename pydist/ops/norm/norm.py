"""Normalizes by statistics over several ranks: the core of all norms.

Forward has one exchange: each rank's mean and squared deviations; the counts follow from the
layout. Backward has one exchange: Σ dy and Σ dy (x - mean), in flight while the parameters'
gradients are computed. A step reads x four times from memory (statistics, result, sums, dL/dx) and
dL/dy twice, with or without a ReLU directly after the norm. It allocates no tensors of an
activation's size except the two results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pydist.backend.statistics import (
    Rows,
    Transform,
    apply,
    combine,
    gradient_sums,
    per_channel,
    statistics_dtype,
    strided_like,
)
from pydist.exchange.adjoints import (
    all_reduce_sum,
    enter_weighted_sum,
    leave_weighted_sum,
    scale_grad,
)
from pydist.exchange.function import ExchangeFunction
from pydist.group_sizes import GroupSizes
from pydist.ops.conv.local_conv import apart, differentiable
from pydist.ops.fusion.handover import Handover
from pydist.ops.fusion.prelu import Handed, parametric, regain, release
from pydist.ops.fusion.relu import with_relu
from pydist.ops.norm.norm_plan import NormPlan


@dataclass(frozen=True)
class _NormCall:
    plan: NormPlan
    eps: float
    centered: bool
    sizes: GroupSizes | None
    handover: Handover[Handed] = field(default_factory=Handover)


class AppliedNorm:
    """Norm that is applied to a shard once its statistics over all ranks are known.

    Args:
        x: dense, [N, C, ...], may be empty; the result has its memory format.
        scale: [C] or `None`.
        shift: [C] or `None`.
        statistics: of `x`, over all ranks of the plan, as returned by `merged`.
        plan: of the statistics.
        eps: added to the variance.
        centered: whether the mean is subtracted; if not, the mean of squares replaces the variance.
        sizes: of the sample groups, if the statistics span several.
    """

    def __init__(
        self,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        statistics: Tensor,
        plan: NormPlan,
        eps: float,
        centered: bool = True,
        sizes: GroupSizes | None = None,
    ) -> None:
        rows = x.shape[1] * (x.shape[0] if plan.per_sample else 1)
        self._with_slopes = Rows(statistics, scale, eps, centered).values(shift, rows, x.dtype)
        self._values = self._with_slopes[:3]
        self.x = x
        self._operands = x, scale, shift, statistics, self._values
        self._call = _NormCall(plan, eps, centered, sizes)

    def result(self) -> Tensor:
        """Computes (x - mean) / sqrt(var + eps) · scale + shift, differentiable twice."""
        out = torch.empty_like(self.x)
        result = self.node(out)
        self.write(out)
        return result

    def node(self, out: Tensor) -> Tensor:
        """Returns `out` as the result in autograd's graph; the other methods fill it."""
        result: Tensor = _Normalize.apply(*self._operands, out, self._call)
        return result

    def write(self, out: Tensor) -> None:
        """Writes the result into `out`, which may have been released."""
        self._call.handover.is_shared = True
        if self.x.numel():
            regain(out)
            apply(out, self.x.detach(), Transform(self._values))

    def with_relu(self, y: Tensor, negative_slope: float) -> Tensor:
        """Writes the result after an in-place ReLU in one pass; differentiable twice.

        Args:
            y: the result of `node`, not written yet.
            negative_slope: 0 for a ReLU; in [0, 1).
        """
        transform = Transform(self._values, negative_slope)
        apply(y.detach(), self.x.detach(), transform)
        given = self._call.handover, (transform, None)
        return with_relu(y, negative_slope, Handover(), given)

    def parametric(self, y: Tensor, slope: Tensor) -> Tensor:
        """Computes PReLU of the result in one pass; differentiable twice.

        Args:
            y: the result of `node`, not written yet; its memory is released until it is written.
            slope: [1] or [C].
        """
        release(y)
        x, call = self.x.detach(), self._call
        return parametric(y, slope, x, self._with_slopes, call.handover)


class _Normalize(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        statistics: Tensor,
        values: Tensor,
        out: Tensor,
        call: _NormCall,
    ) -> Tensor:
        ctx.call, ctx.mesh = call, call.plan.mesh
        ctx.shift_dtype = None if shift is None else shift.dtype
        ctx.save_for_backward(x, scale, statistics, values)  # not the shift, which may change
        return out.detach()

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, statistics, values = saved
        call: _NormCall = ctx.call
        plan, mesh = call.plan, call.plan.mesh
        for_x, for_scale, for_shift, *_ = ctx.needs_input_grad
        rest = (None,) * 4
        if torch.is_grad_enabled():
            n = statistics[0, :1].clamp(min=1)  # equal for all rows
            grad_x, grad_scale = _by_composition(ctx, x, scale, n, grad)
            of_all = (
                grad.transpose(0, 1).flatten(1).sum(1).to(ctx.shift_dtype) if for_shift else None
            )
            return grad_x, grad_scale, of_all, *rest
        transform, sums = call.handover.take(grad) or (Transform(values), None)
        grad = strided_like(grad, x)
        if sums is None:
            sums = gradient_sums(grad, x, transform)
        rows = Rows(statistics, scale, call.eps, call.centered)
        affine = sums.new_empty(2, x.shape[1]) if for_scale or for_shift else None
        totals = rows.totals(values, sums, affine)
        if for_x and plan.ranks > 1:
            with mesh.session.timers.measure("statistics"):
                enter_weighted_sum(totals, call.sizes)
                work = plan.group.all_reduce_async(totals)
        grad_shift = affine[0].to(ctx.shift_dtype) if affine is not None and for_shift else None
        grad_scale = affine[1].to(scale.dtype) if affine is not None and for_scale else None
        if not for_x:
            return None, grad_scale, grad_shift, *rest
        grad_x = torch.empty_like(x)
        if plan.ranks > 1:
            with mesh.session.timers.measure("statistics"):
                work.wait()
                leave_weighted_sum(totals, call.sizes)
        combine(grad_x, grad, x, transform, rows.coefficients(values, totals))
        return grad_x, grad_scale, grad_shift, *rest


def _by_composition(
    ctx: Any, x: Tensor, scale: Tensor | None, n: Tensor, grad: Tensor
) -> list[Tensor | None]:
    """Computes differentiable gradients of x and scale by recomputing the result."""
    # The scale may be computed from x, or shared with a layer before it.
    x, factor = apart(x, x if scale is None else scale, ctx.needs_input_grad)
    scale = None if scale is None else factor
    y = _composed(x, n, ctx.call)
    if scale is not None:
        y = y * per_channel(scale, y)
    return differentiable(y.to(x.dtype), (x, scale), ctx.needs_input_grad, grad)


def _composed(x: Tensor, n: Tensor, call: _NormCall) -> Tensor:
    """Computes (x - mean) / sqrt(var + eps) fully in the graph, for second derivatives."""
    plan = call.plan
    samples, channels, members = *x.shape[:2], plan.members
    voxels = x[:1, :1].numel()
    values = x.to(statistics_dtype(x.dtype)).reshape(samples, channels // members, members, voxels)
    over = (2, 3) if plan.per_sample else (0, 2, 3)
    # Each rank that shares the statistics contributes a part of their gradient.
    copies = len(plan.counts)
    n = n.to(values.dtype)

    def mean_of(t: Tensor) -> Tensor:
        part = t.sum(over, keepdim=True)
        return all_reduce_sum(part, plan.mesh, plan.axes, sizes=call.sizes) / n

    if call.centered:
        values = values - scale_grad(mean_of(values), copies)
    inverse = torch.rsqrt(mean_of(values * values) + call.eps)
    return (values * scale_grad(inverse, copies)).reshape(x.shape)
