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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.backend.conv_kernels import ConvKernels
from pydist.exchange.function import ExchangeFunction
from pydist.exchange.left_weights import LeftWeight, out_of_graph
from pydist.ops.conv.local_conv import ConvChooser, apart, bias_gradient, with_bias
from pydist.ops.conv.slab_kernels import SlabChooser, SlabKernels, as_read
from pydist.ops.fusion.handover import hook_on_saved
from pydist.ops.fusion.relu import ConvOutputs, deferred_bias
from pydist.ops.windows import Window, WindowPlan
from pydist.partition import Box


class CorrectionPlan:
    """Plan that holds the boxes and kernels of a convolution by correction.

    Args:
        plan: the window plan of the convolution.
        weights: shape of each rank's weight, and its number of groups.
        chooser: of the main convolution, on this rank's shard.
        recompute: computes the convolution of a shard and a weight by the general path, without
            bias, for double backward.
        is_adjoint: whether the convolution runs backward, as a transposed one.

    Attributes:
        inputs: box of this rank's shard of the input.
        outputs: box of this rank's shard of the result.
        roles: roles of the slab kernels in forward, and for dL/dx.
    """

    def __init__(
        self,
        plan: WindowPlan,
        weights: Sequence[tuple[tuple[int, ...], int]],
        chooser: ConvChooser,
        recompute: Callable[[Tensor, Tensor], Tensor],
        is_adjoint: bool = False,
    ) -> None:
        self.plan, self.chooser, self.recompute = plan, chooser, recompute
        self.is_adjoint = is_adjoint
        self.mesh = plan.layout.mesh
        boxes = plan.layout.box, plan.out.box
        self.inputs, self.outputs = reversed(boxes) if is_adjoint else boxes
        self.roles = ("dgrad", "forward") if is_adjoint else ("forward", "dgrad")
        padding = tuple(before for before, _ in plan.window.padding)
        self.slab_chooser = SlabChooser(plan, padding, weights, is_adjoint)


def lines_up(plan: WindowPlan) -> bool:
    """Returns whether a convolution of the shard gives exactly the rank's outputs, on all ranks."""
    return len(plan.window.kernel) > 1 and all(
        _lines_up(plan.window, own, out)
        for own, out in zip(plan.layout.boxes, plan.out.boxes, strict=True)
    )


def _lines_up(window: Window, own: Box, out: Box) -> bool:
    if own.empty or out.empty:
        return False
    for dim, (before, after) in enumerate(window.padding):
        stride = window.stride[dim]
        reach = window.dilation[dim] * (window.kernel[dim] - 1) + 1
        lo, extent = own.lo[dim + 2], own.shape[dim + 2]
        computed = (extent + 2 * before - reach) // stride + 1
        if before != after or lo % stride or lo // stride != out.lo[dim + 2]:
            return False
        if computed != out.shape[dim + 2]:
            return False
    return True


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
        x: the shard [N, Ci, ...], with 2 or 3 spatial dims.
        weight: [Co, Ci / groups, ...]; if transposed, [Ci, Co / groups, ...].
        bias: [Co] or `None`.
        plan: of this convolution, whose blocks and windows are aligned.

    Returns:
        The shard [N, Co, ...] of the result, and its state: a bias is added later on CUDA.
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
