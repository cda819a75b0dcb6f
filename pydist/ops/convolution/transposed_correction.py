"""Transposed convolution by correction: a call on the shard, the neighbours' slabs added to it.

It is the adjoint of convolution by correction. The main call on the shard runs while slabs of x
travel, whose contributions are then added into the outputs that they reach; in backward slabs of
dL/dy travel. No padded copy is made, no output is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pydist.backend.choice import ConvKernels
from pydist.exchange.function import ExchangeFunction
from pydist.ops.convolution.correction_plan import CorrectionPlan
from pydist.ops.convolution.local_conv import bias_gradient
from pydist.ops.convolution.local_transposed import second_order, transposed_by_torch
from pydist.ops.convolution.slab_kernels import SlabKernels, as_read
from pydist.ops.gathering import BoxGatherer
from pydist.ops.handover import hook_on_saved


@dataclass(frozen=True)
class Recomputation:
    """How the general path computes what correction does, for gradients of gradients.

    Attributes:
        gathers: brings the inputs that this rank's outputs need.
        starts: which output of the inputs brought is the first of this rank's, a dim.
        extents: of this rank's outputs.
    """

    gathers: BoxGatherer
    starts: Sequence[int]
    extents: Sequence[int]


class _CorrectedTransposed(ExchangeFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: CorrectionPlan,
        kernels: ConvKernels,
        slab_kernels: SlabKernels,
        recomputation: Callable[[], Recomputation],
    ) -> Tensor:
        exchanges, timers = plan.plan.exchanges(kernels.channels_last), plan.mesh.session.timers
        halo = exchanges.grad_halo
        pending = halo.start(x)
        with timers.measure("convolution"):
            y = kernels.run_transposed(x, weight, bias)
        slabs = exchanges.receive(halo, pending, x)
        lo = plan.plan.layout.box.lo[2:]
        with timers.measure("boundary"):
            kernel = as_read(weight.detach())
            for i, (slab, box) in enumerate(zip(slabs, halo.slots, strict=True)):
                slab_kernels.add("dgrad", i, slab, kernel, y, box.lo[2:], lo)
        ctx.plan, ctx.mesh, ctx.kernels = plan, plan.mesh, kernels
        ctx.recomputation, ctx.slab_kernels = recomputation, slab_kernels
        # In a checkpoint the weight may be frozen, or no longer be so, when all is computed again.
        keeps = ctx.needs_input_grad[1] or hook_on_saved() is not None
        for_wgrad = slabs if keeps else ()
        ctx.save_for_backward(x, weight, *for_wgrad)  # the bias may change, as with torch
        return y

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *for_wgrad = saved
        plan: CorrectionPlan = ctx.plan
        if torch.is_grad_enabled():
            grads = second_order(_by_gathering(ctx), x, weight, ctx, grad)
            return (*grads, None, None, None, None)
        kernels: ConvKernels = ctx.kernels
        slab_kernels: SlabKernels = ctx.slab_kernels
        exchanges = plan.plan.exchanges(kernels.channels_last)
        timers = plan.mesh.session.timers
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        grad = kernels.in_format(grad)
        pending = exchanges.halo.start(grad) if for_x else None
        out_lo, in_lo = plan.plan.layout.box.lo[2:], plan.plan.out.box.lo[2:]
        if for_weight:
            # All of wgrad comes first: the halo has the longer to travel.
            with timers.measure("wgrad"):
                grad_weight = as_read(kernels.run_wgrad(grad, x, weight))
            plan.mesh.world.progress()
            with timers.measure("boundary"):
                received = zip(for_wgrad, exchanges.grad_halo.slots, strict=True)
                for i, (slab, box) in enumerate(received):
                    slab_kernels.add("wgrad", i, grad, slab, grad_weight, out_lo, box.lo[2:])
        if pending is not None:
            with timers.measure("dgrad"):
                grad_x = kernels.run_forward(grad, weight, None)
            slabs = exchanges.receive(exchanges.halo, pending, grad)
            with timers.measure("boundary"):
                kernel = as_read(weight)
                for i, (slab, box) in enumerate(zip(slabs, exchanges.halo.slots, strict=True)):
                    slab_kernels.add("forward", i, slab, kernel, grad_x, box.lo[2:], in_lo)
        grad_bias = bias_gradient(grad) if for_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _by_gathering(ctx: Any) -> Callable[[Tensor, Tensor], Tensor]:
    plan: CorrectionPlan = ctx.plan
    found: Recomputation = ctx.recomputation()
    stride, _, dilation, groups = plan.geometry

    def again(x: Tensor, weight: Tensor) -> Tensor:
        attributes = stride, dilation, groups, found.starts, found.extents
        return transposed_by_torch(found.gathers(x), weight, *attributes)

    return again


def corrected_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: CorrectionPlan,
    recomputation: Callable[[], Recomputation],
) -> Tensor:
    """This rank's part of a transposed convolution, from its shard and its neighbours' slabs.

    Args:
        x: the shard [N, Ci, D, H, W].
        weight: [Ci, Co / groups, kD, kH, kW].
        bias: [Co] or `None`.
        plan: of the convolution that leads back; blocks and windows line up on every rank.
        recomputation: asked for if backward is to be differentiated.

    Returns:
        The shard [N, Co, D', H', W'] of the result.
    """
    kernels = plan.chooser.kernels_ahead(x, weight)
    # Here, and not in the function: what that saves has to be its input.
    x = kernels.in_format(x)
    slab_kernels = plan.slab_chooser.kernels(x, weight, kernels.channels_last)
    return _CorrectedTransposed.apply(x, weight, bias, plan, kernels, slab_kernels, recomputation)
