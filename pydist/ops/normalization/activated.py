"""An in-place ReLU, leaky or not, right after a norm: one pass over memory for both, each way.

The graph is x → y → z, with a node for the norm and one for the ReLU, as without fusing: the norm's
node exchanges sums in backward, and its place in the graph must not depend on whether this rank
fuses. Backward of z hands dL/dz on as it is, with the ReLU's slope, and the norm applies the
derivative while it reads x, from which the ReLU's sign follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydist.ops.handover import Handover, runs
from pydist.ops.normalization.statistics import Transform, apply, combine, strided_like

Handed = tuple[Transform, Tensor | None]
"""The transform with the slopes, and the sums [2, R] of `gradient_sums`, if they are known."""


def rectified(y: Tensor, x: Tensor, transform: Transform, handover: Handover[Handed]) -> Tensor:
    """The ReLU of a norm's result in its place, differentiable twice.

    Args:
        y: the norm's result in the graph, not yet written.
        x: the norm's input, detached.
        transform: of the norm and the ReLU.
        handover: to the norm's backward.
    """
    result: Tensor = _Rectify.apply(y, x, transform, handover)
    return result


def differentiated(grad: Tensor, x: Tensor, transform: Transform) -> Tensor:
    """dL/dy from dL/dz, of an activation z of a norm's result y.

    Args:
        grad: dL/dz, of the shape and strides of x.
        x: the norm's input.
        transform: of the norm and the activation.
    """
    grad_y = torch.empty_like(x)
    as_it_is = torch.zeros_like(transform.values[:3])
    as_it_is[0] = 1
    combine(grad_y, grad, x, transform, as_it_is)
    return grad_y


class _Rectify(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, transform: Transform, handover: Handover[Handed]
    ) -> Tensor:
        ctx.mark_dirty(y)
        ctx.transform, ctx.handover = transform, handover
        ctx.save_for_backward(x)
        apply(y, x, transform)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        transform, rest = ctx.transform, (None,) * 3
        if torch.is_grad_enabled():
            ones = torch.ones_like(x)
            return grad * differentiated(ones, x, transform), *rest
        if runs(ctx, 0):
            ctx.handover.give(grad, (transform, None))
            return grad, *rest
        return differentiated(strided_like(grad, x), x, transform), *rest
