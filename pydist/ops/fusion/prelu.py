"""PReLU right behind a norm: one pass over memory for both, forward and backward.

z = PReLU(y), y = norm(x). PReLU is not in place, so y is a tensor that others may ask for; until
they do it is not written and has no memory. The graph is as everybody sees it, x → y → z. Backward
of z reads dL/dz and x once, for what the slopes get and for the sums that the norm needs. Where
nobody has asked for y, it hands both on, and the norm finds dL/dy on its way from x. Else z gives
dL/dy as it is.
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
    """Gives the memory of a tensor back that nobody has asked for."""
    y.untyped_storage().resize_(0)


def is_released(y: Tensor) -> bool:
    """Whether the tensor has no memory; true of empty ones."""
    return y.untyped_storage().nbytes() == 0


def regain(y: Tensor) -> None:
    """Gives a dense tensor memory again; what is in it is left to others."""
    if is_released(y):
        y.untyped_storage().resize_(y.numel() * y.element_size())


def parametric(
    y: Tensor, slope: Tensor, x: Tensor, values: Tensor, handover: Handover[Handed]
) -> Tensor:
    """PReLU of a norm's result, differentiable twice.

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
        # Not among what is saved: hooks on that may look at it, and it has no memory.
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
            ctx.y = None  # as what is saved, which the engine lets go of now
        # The slopes as they are now, perhaps changed past autograd, as torch's own backward does.
        set_slopes(values, slope)
        for_y, for_slope, *_ = ctx.needs_input_grad
        grad, transform = strided_like(grad, x), Transform(values)
        sums = gradient_sums(grad, x, transform)
        grad_slope = None
        if for_slope:
            of_channels = sums[2].view(-1, x.shape[1]).sum(0)
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
    """Gradients with a graph of their own, for which y has to be there."""
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
    # As torch has it: what depends on what is the same on ranks that do not fuse.
    own = per_channel(slope, y) if slope.numel() > 1 else slope.view(*[1] * y.dim())
    grad_y, of_all = torch.ops.aten._prelu_kernel_backward(grad, y, own)
    by_channel = of_all.transpose(0, 1).flatten(1).sum(1)
    grad_slope = by_channel if slope.numel() > 1 else by_channel.sum().view(1)
    for_y, for_slope, *_ = ctx.needs_input_grad
    return grad_y if for_y else None, grad_slope if for_slope else None
