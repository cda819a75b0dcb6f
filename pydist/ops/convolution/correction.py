"""Convolution and transposed convolution by correction: the shard first, then the slabs.

Convolution is linear, so y = conv(own shard, zero padded) + Σ conv(halo slab). The main call starts
at once, on the unpadded shard, while the halos travel; then each slab is convolved into the
boundary planes that it reaches. Backward has the same shape: the slabs of dL/dy travel while the
main dgrad and wgrad run. No padded copy of the activation is made, no plane is computed twice.

A transposed convolution is the adjoint of a convolution, and runs as that one backwards
(`CorrectionPlan.is_adjoint`): its main call is that one's dgrad, its slabs are those of that one's
dL/dy, and its gradients are that one's forward and wgrad.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydist.backend.conv_kernels import ConvKernels
from pydist.exchange.function import ExchangeFunction
from pydist.ops.convolution.boundary import DeferredBoundary
from pydist.ops.convolution.correction_plan import CorrectionPlan
from pydist.ops.convolution.deferred_relu import DeferredOutputs
from pydist.ops.convolution.finish import bias_behind
from pydist.ops.convolution.local_conv import apart, bias_gradient, with_bias
from pydist.ops.convolution.slab_kernels import as_read
from pydist.ops.handover import hook_on_saved
from pydist.partition import Box


class _Corrected(ExchangeFunction):
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
        boundary.start(x, weight)
        with plan.mesh.session.timers.measure("convolution"):
            added = bias if boundary.bias is None else None
            y = (kernels.run_transposed if plan.is_adjoint else kernels.run_forward)(
                x, weight, added
            )
        boundary.outputs = y.data
        ctx.plan, ctx.mesh, ctx.kernels = plan, plan.mesh, kernels
        ctx.slab_kernels = boundary.kernels
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
        x, weight, *slabs = saved
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # With a graph of its own: computes anew by the general path, and differentiates that.
            x, weight = apart(x, weight, needed)
            y = ctx.plan.recompute(x, weight)
            return (*with_bias(y, (x, weight), needed, grad), None, None)
        plan: CorrectionPlan = ctx.plan
        for_x, for_weight, for_bias = needed[:3]
        grad = ctx.kernels.in_format(grad)
        grad_x = grad_weight = None

        def gradients() -> Tensor:
            nonlocal grad_weight
            if for_weight:  # first: the halo has the longer to travel
                received = slabs if ctx.boundary is None else ctx.boundary.slabs
                grad_weight = _weight_gradient(ctx, x, grad, weight, received)
            with plan.mesh.session.timers.measure("dgrad"):
                if plan.is_adjoint:
                    return ctx.kernels.run_forward(grad, weight, None)
                return ctx.kernels.run_dgrad(x, grad, weight)

        def add(grad_x: Tensor, number: int, slab: Tensor, box: Box) -> None:
            where = box.lo[2:], plan.inputs.lo[2:]
            ctx.slab_kernels.add(plan.roles[1], number, slab, as_read(weight), grad_x, *where)

        if for_x:
            exchanges = plan.plan.exchanges(ctx.kernels.channels_last)
            halo = exchanges.halo if plan.is_adjoint else exchanges.grad_halo
            grad_x = exchanges.corrected(halo, grad, gradients, add)
        elif for_weight:
            received = slabs if ctx.boundary is None else ctx.boundary.slabs
            grad_weight = _weight_gradient(ctx, x, grad, weight, received)
        return grad_x, grad_weight, bias_gradient(grad) if for_bias else None, None, None


def _weight_gradient(
    ctx: Any, x: Tensor, grad: Tensor, weight: Tensor, slabs: list[Tensor]
) -> Tensor:
    """dL/dweight from the shards of x and dL/dy, and the slabs of x that forward received."""
    plan: CorrectionPlan = ctx.plan
    timers, exchanges = plan.mesh.session.timers, plan.plan.exchanges(ctx.kernels.channels_last)
    halo = exchanges.grad_halo if plan.is_adjoint else exchanges.halo
    with timers.measure("wgrad"):
        operands = (grad, x) if plan.is_adjoint else (x, grad)
        found = as_read(ctx.kernels.run_wgrad(*operands, weight))
    plan.mesh.world.progress()
    own = grad, plan.outputs.lo[2:]
    with timers.measure("boundary"):
        for number, (slab, box) in enumerate(zip(slabs, halo.slots, strict=True)):
            other = slab, box.lo[2:]
            (first, first_lo), (second, second_lo) = (
                (own, other) if plan.is_adjoint else (other, own)
            )
            ctx.slab_kernels.add("wgrad", number, first, second, found, first_lo, second_lo)
    return found


def corrected(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: CorrectionPlan
) -> tuple[Tensor, DeferredBoundary | DeferredOutputs]:
    """This rank's part of a convolution, from its shard and the slabs of its neighbours.

    Args:
        x: the shard [N, Ci, D, H, W].
        weight: [Co, Ci / groups, kD, kH, kW]; of a transposed one [Ci, Co / groups, kD, kH, kW].
        bias: [Co] or `None`.
        plan: of this convolution; blocks and windows line up.

    Returns:
        The shard [N, Co, D', H', W'] of the result, and what is to be completed before its
        boundary is right.
    """
    chooser = plan.chooser
    kernels = (chooser.kernels_ahead if plan.is_adjoint else chooser.kernels)(x, weight)
    # Here, and not in the function: what that saves has to be its input.
    x = kernels.in_format(x)
    slab_kernels = plan.slab_chooser.kernels(x, weight, kernels.channels_last)
    behind = bias_behind(x, bias)
    boundary = DeferredBoundary(plan, kernels.channels_last, slab_kernels, behind)
    y = _Corrected.apply(x, weight, bias, boundary, kernels)
    if boundary.is_deferrable:
        return y, boundary
    boundary.complete_now()
    return y, DeferredOutputs(y, behind)
