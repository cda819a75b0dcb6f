"""Convolution by correction: one library call on the shard, the halo's part added afterwards.

Convolution is linear, so y = conv(own shard, zero padded) + Σ conv(halo slab). The main call starts
at once, on the unpadded shard, while the halos travel; then each slab is convolved into the
boundary planes that it reaches. Backward has the same shape: the slabs of dL/dy travel while the
main dgrad and wgrad run. No padded copy of the activation is made, no plane is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.backend.choice import ConvKernels
from pydist.exchange.function import ExchangeFunction
from pydist.ops.convolution.boundary import DeferredBoundary
from pydist.ops.convolution.correction_plan import CorrectionPlan
from pydist.ops.convolution.deferred_relu import DeferredOutputs
from pydist.ops.convolution.finish import bias_behind
from pydist.ops.convolution.local_conv import (
    apart,
    bias_gradient,
    unpadded_conv,
    with_bias,
)
from pydist.ops.convolution.slab_kernels import SlabKernels, as_read
from pydist.ops.handover import hook_on_saved


class _CorrectedConv(ExchangeFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        boundary: DeferredBoundary,
        kernels: ConvKernels,
    ) -> Tensor:
        plan = boundary.plan
        timers = plan.mesh.session.timers
        boundary.start(x, weight)
        with timers.measure("convolution"):
            y = kernels.run_forward(x, weight, bias if boundary.bias is None else None)
        boundary.outputs = y.data
        ctx.plan, ctx.mesh, ctx.kernels = plan, plan.mesh, kernels
        ctx.boundary_kernels = boundary.kernels
        if hook_on_saved() is None:
            ctx.boundary = boundary if ctx.needs_input_grad[1] else None
            ctx.save_for_backward(x, weight)  # the bias may change, as with torch
            return y
        # A checkpoint computes the halo again as well, perhaps from other values than now, and
        # saves as many tensors, though the weight may be frozen then.
        boundary.complete_now()
        ctx.boundary = None
        ctx.save_for_backward(x, weight, *boundary.slabs)
        return y

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *halo = saved
        plan: CorrectionPlan = ctx.plan
        if torch.is_grad_enabled():
            return (*_backward_by_gathering(ctx, x, weight, grad), None, None)
        kernels: ConvKernels = ctx.kernels
        slab_kernels: SlabKernels = ctx.boundary_kernels
        exchanges = plan.plan.exchanges(kernels.channels_last)
        timers = plan.mesh.session.timers
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        grad = kernels.in_format(grad)
        pending = exchanges.grad_halo.start(grad) if for_x else None
        if for_weight:
            # All of wgrad comes first: the halo has the longer to travel.
            with timers.measure("wgrad"):
                grad_weight = as_read(kernels.run_wgrad(x, grad, weight))
            plan.mesh.world.progress()
            out_lo = plan.plan.out.box.lo[2:]
            with timers.measure("boundary"):
                halo = halo if ctx.boundary is None else ctx.boundary.slabs
                received = zip(halo, exchanges.halo.slots, strict=True)
                for i, (slab, box) in enumerate(received):
                    slab_kernels.add("wgrad", i, slab, grad, grad_weight, box.lo[2:], out_lo)
        if pending is not None:
            with timers.measure("dgrad"):
                grad_x = kernels.run_dgrad(x, grad, weight)
            slabs = exchanges.receive(exchanges.grad_halo, pending, grad)
            in_lo = plan.plan.layout.box.lo[2:]
            with timers.measure("boundary"):
                kernel = as_read(weight)
                received = zip(slabs, exchanges.grad_halo.slots, strict=True)
                for i, (slab, box) in enumerate(received):
                    slab_kernels.add("dgrad", i, slab, kernel, grad_x, box.lo[2:], in_lo)
        return grad_x, grad_weight, bias_gradient(grad) if for_bias else None, None, None


def _backward_by_gathering(
    ctx: Any, x: Tensor, weight: Tensor, grad: Tensor
) -> Sequence[Tensor | None]:
    """Backward with a graph of its own: recomputes by the general path, and differentiates that."""
    plan: CorrectionPlan = ctx.plan
    stride, _, dilation, groups = plan.geometry
    x, weight = apart(x, weight, ctx.needs_input_grad)
    padded = plan.plan.gathers(x)
    y = unpadded_conv(padded, weight, stride, dilation, groups)
    return with_bias(y, (x, weight), ctx.needs_input_grad, grad)


def corrected_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: CorrectionPlan
) -> tuple[Tensor, DeferredBoundary | DeferredOutputs]:
    """This rank's part of the convolution, from its shard and the slabs of its neighbours.

    Args:
        x: the shard [N, Ci, D, H, W].
        weight: [Co, Ci / groups, kD, kH, kW].
        bias: [Co] or `None`.
        plan: of this convolution; blocks and windows line up (`lines_up`).

    Returns:
        The shard [N, Co, D', H', W'] of the result, and what is to be completed before its
        boundary is right.
    """
    kernels = plan.chooser.kernels(x, weight)
    # Here, and not in the function: what that saves has to be its input.
    x = kernels.in_format(x)
    slab_kernels = plan.slab_chooser.kernels(x, weight, kernels.channels_last)
    behind = bias_behind(x, bias)
    boundary = DeferredBoundary(plan, kernels.channels_last, slab_kernels, behind)
    y = _CorrectedConv.apply(x, weight, bias, boundary, kernels)
    if boundary.is_deferrable:
        return y, boundary
    boundary.complete_now()
    return y, DeferredOutputs(y, behind)
