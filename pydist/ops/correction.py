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
from torch.autograd import Function

from pydist._loader import native
from pydist.comm.adjoints import begin_backward, gather_box
from pydist.comm.exchanger import Exchanger
from pydist.layout import Layout
from pydist.ops.windows import Window, WindowPlan
from pydist.partition import Box, subtract


class CorrectionPlan:
    """The two exchanges of a convolution by correction: slabs of x, and slabs of dL/dy.

    Attributes:
        halo: slabs of the input that this rank's outputs need.
        grad_halo: slabs of dL/dy to which this rank's inputs contributed.
    """

    def __init__(self, window: Window, plan: WindowPlan, groups: int) -> None:
        self.window, self.plan, self.groups = window, plan, groups
        self.mesh = plan.layout.mesh
        self.padding = tuple(before for before, _ in window.padding)
        domain, out_domain = _domain(plan.layout), _domain(plan.out)
        own, out = plan.layout.boxes, plan.out.boxes
        needs = [
            subtract(need.intersect(domain), mine)
            for need, mine in zip(plan.needed, own, strict=True)
        ]
        feeds = [
            subtract(self._feeds(mine, computed).intersect(out_domain), computed)
            for mine, computed in zip(own, out, strict=True)
        ]
        self.halo = Exchanger(self.mesh.sample, own, needs)
        self.grad_halo = Exchanger(self.mesh.sample, out, feeds)

    def _feeds(self, own: Box, computed: Box) -> Box:
        lo, hi = list(computed.lo), list(computed.hi)
        for dim in range(2, len(lo)):
            lo[dim], hi[dim] = self.window.footprint(dim - 2).feeds(own.lo[dim], own.hi[dim])
        return Box(lo, hi)

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Stride, padding, dilation and groups, as the native kernels take them."""
        return self.window.stride, self.padding, self.window.dilation, self.groups


def plan_correction(window: Window, plan: WindowPlan, groups: int) -> CorrectionPlan | None:
    """The correction's plan, or `None` where blocks and windows do not line up on every rank."""
    mesh = plan.layout.mesh
    key = ("correction", plan.layout, window, plan.out.shape[1], groups)
    if key not in mesh.plans:
        fits = len(window.kernel) == 3 and all(
            _lines_up(window, own, out)
            for own, out in zip(plan.layout.boxes, plan.out.boxes, strict=True)
        )
        mesh.plans[key] = CorrectionPlan(window, plan, groups) if fits else None
    return mesh.plans[key]


def _lines_up(window: Window, own: Box, out: Box) -> bool:
    """Whether a plain convolution of the shard gives this rank's outputs, each at its place."""
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


def _domain(layout: Layout) -> Box:
    return Box([0] * len(layout.shape), layout.shape)


class _CorrectedConv(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: CorrectionPlan
    ) -> Tensor:
        stride, padding, dilation, groups = plan.geometry
        pending = plan.halo.start(x)
        y = torch.convolution(
            x, weight, bias, stride, padding, dilation, False, (0, 0, 0), groups
        ).contiguous()
        slabs = _finish(plan, plan.halo, pending, x)
        out_lo = plan.plan.out.box.lo[2:]
        kernel = weight.detach().contiguous()
        for slab, box in zip(slabs, plan.halo.slots, strict=True):
            native.boundary_conv_forward(slab, kernel, y, box.lo[2:], out_lo, *plan.geometry)
        ctx.plan, ctx.bias_sizes = plan, None if bias is None else list(bias.shape)
        ctx.slabs = slabs if ctx.needs_input_grad[1] else []
        ctx.save_for_backward(x, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        plan: CorrectionPlan = ctx.plan
        begin_backward(plan.mesh)
        if torch.is_grad_enabled():
            return (*_backward_by_gathering(ctx, x, weight, bias, grad), None)
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        pending = plan.grad_halo.start(grad) if for_x else None
        stride, padding, dilation, groups = plan.geometry
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            grad, x, weight, ctx.bias_sizes, stride, padding, dilation, False, (0, 0, 0), groups,
            [for_x, for_weight, for_bias],
        )  # fmt: skip
        out_lo = plan.plan.out.box.lo[2:]
        if for_weight:
            grad_weight = grad_weight.contiguous()
            for slab, box in zip(ctx.slabs, plan.halo.slots, strict=True):
                native.boundary_conv_wgrad(
                    slab, grad, grad_weight, box.lo[2:], out_lo, *plan.geometry
                )
        if pending is not None:
            grad_x = grad_x.contiguous()
            slabs = _finish(plan, plan.grad_halo, pending, grad)
            kernel, in_lo = weight.contiguous(), plan.plan.layout.box.lo[2:]
            for slab, box in zip(slabs, plan.grad_halo.slots, strict=True):
                native.boundary_conv_dgrad(slab, kernel, grad_x, box.lo[2:], in_lo, *plan.geometry)
        return grad_x, grad_weight, grad_bias, None


def _finish(plan: CorrectionPlan, exchanger: Exchanger, pending: Any, like: Tensor) -> list[Tensor]:
    slabs = [like.new_empty(box.shape) for box in exchanger.slots]
    with plan.mesh.timers.measure("halo"):
        exchanger.finish(pending, slabs)
    return slabs


def _backward_by_gathering(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
) -> Sequence[Tensor | None]:
    """Backward with a graph of its own: recomputes by the general path, and differentiates that."""
    plan: CorrectionPlan = ctx.plan
    stride, _, dilation, groups = plan.geometry
    padded = gather_box(x, plan.plan.exchanger, plan.mesh)
    y = torch.conv3d(padded, weight, bias, stride, 0, dilation, groups)
    inputs = (x, weight, bias)
    wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    grads = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))  # type: ignore[arg-type]
    return [next(grads) if needed else None for needed in ctx.needs_input_grad[:3]]


def corrected_conv(x: Tensor, weight: Tensor, bias: Tensor | None, plan: CorrectionPlan) -> Tensor:
    """This rank's part of the convolution, from its shard and the slabs of its neighbours.

    Args:
        x: the shard [N, Ci, D, H, W].
        weight: [Co, Ci / groups, kD, kH, kW].
        bias: [Co] or `None`.
        plan: from `plan_correction`.

    Returns:
        The shard [N, Co, D', H', W'] of the result.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _CorrectedConv.apply(x, weight, bias, plan)
    # Autocast's rule for convolutions, applied here: the slabs have to travel in the same type.
    dtype = torch.get_autocast_dtype(device)
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        return _CorrectedConv.apply(x, weight, bias, plan)
