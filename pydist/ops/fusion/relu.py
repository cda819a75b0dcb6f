"""ReLUs in place, leaky or not: fused with the call before, or deferred for the one after.

On a convolution's outputs they are made when their result is used. By then an average pool may have
read the outputs, and applied the ReLU itself on the way (`pydist.ops.fusion.pool`): nothing else
needs the ReLU's result. Its sign, which is all that backward looks at, is that of the outputs. So
they are neither read nor written for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydist.exchange.function import Function
from pydist.ops.fusion.bias import finish_
from pydist.ops.fusion.handover import Handover, hook_on_saved, runs
from pydist.tensor import ShardedTensor, adopt_local
from pydist.tensor.deferred import Deferred

Given = tuple[Handover[Any], Any]
"""To a backward, and what is given to it."""


class ConvOutputs(Deferred):
    """Outputs of a convolution, complete but for a bias on CUDA; a ReLU may be deferred.

    Args:
        outputs: new memory that no other tensor shares, in the graph.
        bias: [C], to be added; `None` if there is none left.
    """

    def __init__(self, outputs: Tensor, bias: Tensor | None = None) -> None:
        self._outputs, self._bias = outputs.data, bias

    def complete(self) -> None:
        """Adds the bias; does nothing when that has been done."""
        bias, self._bias = self._bias, None
        if bias is not None:
            finish_(self._outputs, bias, 1.0)

    def with_relu(self, shard: Tensor, negative_slope: float) -> tuple[Tensor, Deferred] | None:
        """The outputs after a ReLU in place that is still to be made."""
        if not may_wait(shard):
            return None
        bias, self._bias = self._bias, None
        deferred = DeferredRelu(self._outputs, negative_slope, bias)
        return with_relu(shard, negative_slope, deferred.handover), deferred


class DeferredRelu(Deferred):
    """A ReLU, leaky or not, that is still to be made on outputs that no other tensor shares.

    Args:
        outputs: to be changed. What saved them for backward need not know of it, as the signs
            stay.
        negative_slope: 0 for a ReLU; in [0, 1).
        bias: [C], to be added before; `None` where there is none left.

    Attributes:
        negative_slope: as given.
        is_made: whether it was applied, as its result was used.
        handover: from the backward of who has read the outputs instead to the ReLU's.
    """

    def __init__(self, outputs: Tensor, negative_slope: float, bias: Tensor | None = None) -> None:
        self.negative_slope = negative_slope
        self.is_made = False
        self.handover: Handover[bool] = Handover()
        self._outputs, self._bias = outputs, bias
        self._is_read = False

    def complete(self) -> None:
        """Applies it; does nothing when that has been done."""
        if not self.is_made:
            self.is_made = self.handover.is_shared = True
            self._finish(self.negative_slope)

    def read(self) -> bool:
        """Whether a caller that applies the ReLU itself may read the outputs without it.

        Once only: the gradients of two would be added before the ReLU's backward sees them.
        """
        if self.is_made or self._is_read or hook_on_saved() is not None:
            return False
        self._is_read = True
        if self._bias is not None:
            self._finish(1.0)
        return True

    def _finish(self, negative_slope: float) -> None:
        bias, self._bias = self._bias, None
        finish_(self._outputs, bias, negative_slope)


def relu_in_place(x: ShardedTensor, negative_slope: float) -> ShardedTensor | None:
    """Fuses a ReLU in place with the deferred work of `x`, or defers it.

    Args:
        x: the tensor.
        negative_slope: 0 for a ReLU; in [0, 1).

    Returns:
        x; `None` if there is nothing to fuse with, and nothing was done.
    """
    if x._deferred is None or not 0.0 <= negative_slope < 1.0:
        return None
    done = x._deferred.with_relu(x._shard, negative_slope)
    if done is None:
        return None
    shard, x._deferred = done
    return adopt_local(x, shard)


def may_wait(shard: Tensor) -> bool:
    """Whether outputs may stay as they are after a ReLU in place.

    Not where hooks look at what is saved for backward (checkpointing, offloading), where the graph
    knows nothing of the ReLU, or knows the outputs as a part of something else.
    """
    if shard.is_inference() or shard._is_view():
        return False
    if shard.requires_grad and not torch.is_grad_enabled():
        return False
    return hook_on_saved() is None


def with_relu(
    shard: Tensor, negative_slope: float, after: Handover[Any], before: Given | None = None
) -> Tensor:
    """Outputs after a ReLU in place in autograd's graph; the caller decides what they hold.

    The graph is that of torch's own call, to second order as well: ranks that fuse and ranks that
    do not run the same exchanges.

    Args:
        shard: the outputs.
        negative_slope: 0 for a ReLU; in [0, 1).
        after: from the backward of what reads the outputs instead.
        before: to the backward of what has made the outputs, and what that is given if it applies
            the ReLU's derivative itself.
    """
    result: Tensor = _Relu.apply(shard, negative_slope, after, before)
    return result


class _Relu(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, negative_slope: float, after: Handover[Any], before: Given | None
    ) -> Tensor:
        ctx.mark_dirty(y)
        ctx.negative_slope, ctx.after, ctx.before = negative_slope, after, before
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        rest = (None,) * 3
        if ctx.after.take(grad):
            return grad, *rest  # been through it
        if ctx.before is not None and not torch.is_grad_enabled() and runs(ctx, 0):
            handover, what = ctx.before
            handover.give(grad, what)
            return grad, *rest
        aten = torch.ops.aten
        if ctx.negative_slope == 0.0:
            return aten.threshold_backward(grad, result, 0), *rest
        return aten.leaky_relu_backward(grad, result, ctx.negative_slope, True), *rest
