"""Fuses a PReLU directly after a norm into one pass over memory, forward and backward.

z = PReLU(y), y = norm(x). PReLU is not in place, so other code may use y; until then y is not
written and has no memory. The graph is x → y → z, as without fusion. Backward of z reads dL/dz and
x once, for the slopes' gradients and for the sums that the norm needs. If y has not been used, it
hands over dL/dz and the sums, and the norm's backward computes dL/dy from x in its own pass.
Otherwise the backward of z returns dL/dy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydist.backend.statistics import (
    Transform,
    apply,
    combine,
    gradient_sums,
    per_channel,
    set_slopes,
    strided_like,
)
from pydist.errors import UsageError
from pydist.exchange.function import Function
from pydist.ops.fusion.handover import Handover, runs

Handed = tuple[Transform, Tensor | None]
"""The transform with the activation's slopes, and the sums [2, R] of `gradient_sums`, if known."""


def release(y: Tensor) -> None:
    """Frees the memory of a tensor that has not been used."""
    y.untyped_storage().resize_(0)


def is_released(y: Tensor) -> bool:
    """Returns whether the tensor has no memory; true for empty tensors."""
    return y.untyped_storage().nbytes() == 0


def regain(y: Tensor) -> None:
    """Allocates the memory of a released dense tensor again; the caller fills it."""
    if is_released(y):
        y.untyped_storage().resize_(y.numel() * y.element_size())


def parametric(
    y: Tensor, slope: Tensor, x: Tensor, values: Tensor, handover: Handover[Handed]
) -> Tensor:
    """Computes PReLU of a norm's result; differentiable twice.

    Args:
        y: the norm's result in the graph, released.
        slope: [1] or [C].
        x: the norm's input, detached.
        values: of the norm's transform, [4, R]; the slopes are set here.
        handover: to the norm's backward.
    """
    set_slopes(values, slope)
    result: Tensor = _Prelu.apply(y, slope, x, values, handover)
    return result


class _Prelu(Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        slope: Tensor,
        x: Tensor,
        values: Tensor,
        handover: Handover[Handed],
    ) -> Tensor:
        ctx.handover = handover
        # Not saved for backward: saved-tensor hooks may read it, and it has no memory.
        ctx.y, ctx.version = y, None if y.is_inference() else y._version
        ctx.save_for_backward(slope, x, values)
        z = torch.empty_like(x)
        apply(z, x, Transform(values))
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, x, values = ctx.saved_tensors
        rest = (None,) * 3
        if torch.is_grad_enabled():
            return (*_by_composition(ctx, grad, slope, x, values), *rest)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.y = None  # like saved tensors, which the engine frees now
        # The current slopes, even if changed outside of autograd, as in torch's own backward.
        set_slopes(values, slope)
        for_y, for_slope, *_ = ctx.needs_input_grad
        grad, transform = strided_like(grad, x), Transform(values)
        sums = gradient_sums(grad, x, transform)
        grad_slope = None
        if for_slope:
            of_channels = sums[2].view(-1 if x.shape[1] else 0, x.shape[1]).sum(0)
            grad_slope = of_channels.sum().view(1) if slope.numel() == 1 else of_channels
            grad_slope = grad_slope.to(slope.dtype)
        if not for_y:
            return None, grad_slope, *rest
        if not ctx.handover.is_shared and runs(ctx, 0):
            ctx.handover.give(grad, (transform, sums[:2]))
            return grad, grad_slope, *rest
        grad_y = torch.empty_like(x)
        ones = torch.zeros_like(values[:3])
        ones[0] = 1
        combine(grad_y, grad, x, transform, ones)
        return grad_y, grad_slope, *rest


def _by_composition(
    ctx: Any, grad: Tensor, slope: Tensor, x: Tensor, values: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Computes gradients with their own graph, for which y must be written."""
    y: Tensor = ctx.y
    ctx.handover.is_shared = True
    if is_released(y):
        regain(y)
        apply(y.detach(), x, Transform(values[:3]))
    elif y._version != ctx.version:
        raise UsageError(
            "the result of a norm was changed in place after a PReLU had used it, which needs it "
            "for gradients of gradients; change a clone() of it"
        )
    # torch's own kernel, so that the graph depends on the same tensors as on ranks without fusion.
    own = per_channel(slope, y) if slope.numel() > 1 else slope.view(*[1] * y.dim())
    grad_y, of_all = torch.ops.aten._prelu_kernel_backward(grad, y, own)
    by_channel = of_all.transpose(0, 1).flatten(1).sum(1)
    grad_slope = by_channel if slope.numel() > 1 else by_channel.sum().view(1)
    for_y, for_slope, *_ = ctx.needs_input_grad
    return grad_y if for_y else None, grad_slope if for_slope else None
