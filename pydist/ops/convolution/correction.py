"""Computes (transposed) convolutions by correction: first the shard, then the halo slabs.

Convolution is linear, so y = conv(own shard, zero padded) + Σ conv(halo slab). The main call runs
immediately on the unpadded shard, while the halos are in flight. Then each slab is convolved into
the boundary planes that it reaches. Backward works the same way: the slabs of dL/dy are in flight
while the main dgrad and wgrad run. No activation is copied for padding, and no plane is computed
twice.

A transposed convolution is the adjoint of a convolution, and runs that convolution backward
(`CorrectionPlan.is_adjoint`): its main call is the convolution's dgrad, its slabs are those of the
convolution's dL/dy, and its gradients are the convolution's forward and wgrad.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.backend.conv_kernels import ConvKernels
from pydist.exchange.function import ExchangeFunction
from pydist.exchange.left_weights import LeftWeight, out_of_graph
from pydist.ops.convolution.correction_plan import CorrectionPlan
from pydist.ops.convolution.local_conv import apart, bias_gradient, with_bias
from pydist.ops.convolution.slab_kernels import SlabKernels, as_read
from pydist.ops.fusion.bias import deferred_bias
from pydist.ops.fusion.handover import hook_on_saved
from pydist.ops.fusion.relu import ConvOutputs
from pydist.partition import Box


class _Corrected(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: CorrectionPlan,
        kernels: ConvKernels,
        slab_kernels: SlabKernels,
        adds_bias: bool,
        left: LeftWeight | None,
    ) -> Tensor:
        slabs: list[Tensor] = []
        kernel = as_read(weight)

        def outputs() -> Tensor:
            with plan.mesh.session.timers.measure("convolution"):
                run = kernels.run_transposed if plan.is_adjoint else kernels.run_forward
                return run(x, weight, bias if adds_bias else None)

        def add(y: Tensor, number: int, slab: Tensor, box: Box) -> None:
            slabs.append(slab)
            where = box.lo[2:], plan.outputs.lo[2:]
            slab_kernels.add(plan.roles[0], number, slab, kernel, y, *where)

        exchanges = plan.plan.exchanges(kernels.channels_last)
        halo = exchanges.grad_halo if plan.is_adjoint else exchanges.halo
        y = exchanges.corrected(halo, x, outputs, add)
        ctx.plan, ctx.mesh, ctx.kernels, ctx.slab_kernels = plan, plan.mesh, kernels, slab_kernels
        ctx.left = left
        # The bias is not saved: it may change, as with torch. Under a checkpoint slabs are always
        # saved, as the recomputation must save as many tensors even if the weight is frozen then.
        has_gradient = ctx.needs_input_grad[1] or left is not None
        keeps_slabs = has_gradient or hook_on_saved() is not None
        ctx.save_for_backward(x, weight, *(slabs if keeps_slabs else ()))
        return y

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *slabs = saved
        needed, rest = ctx.needs_input_grad, (None,) * 5
        left: LeftWeight | None = ctx.left
        if torch.is_grad_enabled():
            # Double backward: recomputes by the general path, and differentiates the result.
            weight = weight if left is None else left.weight
            x, weight = apart(x, weight, needed)
            y = ctx.plan.recompute(x, weight)
            return (*with_bias(y, (x, weight), needed, grad), *rest)
        plan: CorrectionPlan = ctx.plan
        for_x, for_weight, for_bias = needed[:3]
        grad = ctx.kernels.in_format(grad)
        grad_x = grad_weight = None
        if left is not None:
            left.leave(ctx, partial(_weight_gradient, ctx, x, grad, weight, slabs))

        def gradients() -> Tensor:
            nonlocal grad_weight
            if for_weight:  # first, to overlap more of the halo exchange
                grad_weight = _weight_gradient(ctx, x, grad, weight, slabs)
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
            grad_weight = _weight_gradient(ctx, x, grad, weight, slabs)
        return grad_x, grad_weight, bias_gradient(grad) if for_bias else None, *rest


def _weight_gradient(
    ctx: Any, x: Tensor, grad: Tensor, weight: Tensor, slabs: list[Tensor]
) -> Tensor:
    """Computes dL/dweight from the shards of x and dL/dy, and the slabs received in forward."""
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
) -> tuple[Tensor, ConvOutputs]:
    """Computes this rank's part of a convolution from its shard and its neighbors' slabs.

    Args:
        x: the shard [N, Ci, D, H, W].
        weight: [Co, Ci / groups, kD, kH, kW]; if transposed, [Ci, Co / groups, kD, kH, kW].
        bias: [Co] or `None`.
        plan: of this convolution, whose blocks and windows are aligned.

    Returns:
        The shard [N, Co, D', H', W'] of the result, and its state: a bias is added later on CUDA.
    """
    chooser = plan.chooser
    kernels = (chooser.kernels_ahead if plan.is_adjoint else chooser.kernels)(x, weight)
    # Outside of the autograd function, which must save its own inputs.
    x = kernels.in_format(x)
    slab_kernels = plan.slab_chooser.kernels(x, weight, kernels.channels_last)
    late = deferred_bias(x, bias)
    weight, left = out_of_graph(plan.mesh, x, weight)
    y = _Corrected.apply(x, weight, bias, plan, kernels, slab_kernels, late is None, left)
    return y, ConvOutputs(y, late)
