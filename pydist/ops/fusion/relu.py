"""Fuses in-place ReLUs, leaky or not, with the call before, or defers them for the next one.

A ReLU of a convolution's outputs is computed when its result is used. If an average pool reads the
outputs before and applies the ReLU itself (`pydist.ops.fusion.pool`), nothing else needs the
ReLU's result. Backward needs only its sign, which is the sign of the outputs. So no extra pass over
the outputs is made for the ReLU.

On CUDA torch adds the bias of a convolution in a separate pass over the outputs, as the cuDNN call
has no bias. There the convolution runs without its bias, which is added together with the ReLU:
one pass instead of two. oneDNN adds the bias while it computes the outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydist.backend.statistics import Transform, apply, dense, per_channel
from pydist.backend.statistics import statistics_dtype as wide
from pydist.exchange.exchanger import stream_of
from pydist.exchange.function import Function
from pydist.ops.fusion.handover import Handover, hook_on_saved, runs
from pydist.tensor import ShardedTensor, replace_shard_
from pydist.tensor.deferred import Deferred, on_stream

Given = tuple[Handover[Any], Any]
"""A handover to a node's backward, and the value to give."""


class ConvOutputs(Deferred):
    """Outputs of a convolution, complete except for a bias on CUDA; a ReLU may be deferred.

    Args:
        outputs: new memory that no other tensor shares, in the graph.
        bias: [C], still to be added; `None` if there is no bias or it was added.
    """

    def __init__(self, outputs: Tensor, bias: Tensor | None = None) -> None:
        self._outputs, self._bias = outputs.data, bias
        self._stream = None if bias is None else stream_of(outputs)

    def complete(self) -> torch.cuda.Stream | None:
        """Adds the bias, if it is not added yet."""
        bias, self._bias = self._bias, None
        if bias is not None:
            with on_stream(self._stream):
                finish_(self._outputs, bias, 1.0)
        return self._stream

    def with_relu(self, shard: Tensor, negative_slope: float) -> tuple[Tensor, Deferred] | None:
        """Returns the outputs after a deferred in-place ReLU, and the deferred ReLU."""
        stream = stream_of(self._outputs)
        if not may_wait(shard) or (self._bias is not None and stream != self._stream):
            return None
        bias, self._bias = self._bias, None
        deferred = DeferredRelu(self._outputs, negative_slope, stream, bias)
        return with_relu(shard, negative_slope, deferred.handover), deferred


class DeferredRelu(Deferred):
    """Deferred in-place ReLU, leaky or not, of outputs that no other tensor shares.

    Args:
        outputs: changed in place; nodes that saved them for backward read only the signs, which
            stay.
        negative_slope: 0 for a ReLU; in [0, 1).
        stream: the one of the ReLU and of the bias; `None` on a CPU.
        bias: [C], to be added first; `None` if there is no bias or it was added.

    Attributes:
        negative_slope: as given.
        is_made: whether the ReLU was applied because its result was used.
        handover: to the ReLU's backward, from the backward of the call that read the outputs.
    """

    def __init__(
        self,
        outputs: Tensor,
        negative_slope: float,
        stream: torch.cuda.Stream | None,
        bias: Tensor | None = None,
    ) -> None:
        self.negative_slope = negative_slope
        self.is_made = False
        self.handover: Handover[bool] = Handover()
        self._outputs, self._bias, self._stream = outputs, bias, stream
        self._is_read = False

    def complete(self) -> torch.cuda.Stream | None:
        """Applies the ReLU, if it is not applied yet."""
        if not self.is_made:
            self.is_made = self.handover.is_shared = True
            with on_stream(self._stream):
                self._finish(self.negative_slope)
        return self._stream

    def read(self) -> bool:
        """Returns whether a caller that applies the ReLU itself may read the outputs without it.

        Only one caller may: autograd would add the gradients of two before the ReLU's backward. It
        may not on another stream, on which nothing orders it before the ReLU.
        """
        if self.is_made or self._is_read or hook_on_saved() is not None:
            return False
        if stream_of(self._outputs) != self._stream:
            return False
        self._is_read = True
        if self._bias is not None:
            self._finish(1.0)
        return True

    def _finish(self, negative_slope: float) -> None:
        bias, self._bias = self._bias, None
        finish_(self._outputs, bias, negative_slope)


def relu_in_place(x: ShardedTensor, negative_slope: float) -> ShardedTensor | None:
    """Fuses an in-place ReLU with the deferred work of `x`, or defers the ReLU.

    Args:
        x: the tensor.
        negative_slope: 0 for a ReLU; in [0, 1).

    Returns:
        x; `None`, without any effect, if there is nothing to fuse with.
    """
    if x._deferred is None or not 0.0 <= negative_slope < 1.0:
        return None
    done = x._deferred.with_relu(x._shard, negative_slope)
    if done is None:
        return None
    shard, x._deferred = done
    return replace_shard_(x, shard)


def may_wait(shard: Tensor) -> bool:
    """Returns whether an in-place ReLU of these outputs can be deferred.

    It can't if saved-tensor hooks see the outputs (checkpointing, offloading), if the graph does
    not record the ReLU, or if the outputs are a view.
    """
    if shard.is_inference() or shard._is_view():
        return False
    if shard.requires_grad and not torch.is_grad_enabled():
        return False
    return hook_on_saved() is None


def with_relu(
    shard: Tensor, negative_slope: float, after: Handover[Any], before: Given | None = None
) -> Tensor:
    """Records an in-place ReLU of outputs in autograd's graph; the caller computes the values.

    The graph is that of torch's own call, also in double backward: ranks that fuse and ranks that
    do not fuse run the same exchanges.

    Args:
        shard: the outputs.
        negative_slope: 0 for a ReLU; in [0, 1).
        after: from the backward of a call that reads the outputs without the ReLU.
        before: to the backward of the call that made the outputs, if it can apply the ReLU's
            derivative itself, with the value to give.
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
            return grad, *rest  # the ReLU's derivative is already applied
        if ctx.before is not None and not torch.is_grad_enabled() and runs(ctx, 0):
            handover, what = ctx.before
            handover.give(grad, what)
            return grad, *rest
        aten = torch.ops.aten
        if ctx.negative_slope == 0.0:
            return aten.threshold_backward(grad, result, 0), *rest
        return aten.leaky_relu_backward(grad, result, ctx.negative_slope, True), *rest


def deferred_bias(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns a copy of the bias if it is added after a convolution of x, not by the convolution.

    It is a copy because an optimizer may change the bias before it is added.
    """
    return bias.detach().clone() if bias is not None and x.is_cuda else None


def finish_(y: Tensor, bias: Tensor | None, negative_slope: float) -> None:
    """Adds a bias and applies a ReLU, in place and outside of autograd's graph.

    Args:
        y: [N, C, ...], may be empty.
        bias: [C] or `None`.
        negative_slope: of the ReLU; 1 for no ReLU.
    """
    with torch.no_grad():
        if bias is None:
            leaky_relu_(y, negative_slope)
        elif dense(y) is not y:
            leaky_relu_(y.add_(per_channel(bias, y)), negative_slope)
        elif y.numel():
            # (y - 0) 1 + bias
            values = torch.zeros(3, len(bias), dtype=wide(y.dtype), device=y.device)
            values[1] = 1.0
            values[2] = bias
            apply(y, y, Transform(values, negative_slope))


def leaky_relu_(x: Tensor, negative_slope: float) -> None:
    """Applies a leaky ReLU in place; does nothing for a slope of 1."""
    if negative_slope == 0.0:
        torch.relu_(x)
    elif negative_slope != 1.0:
        torch._C._nn.leaky_relu_(x, negative_slope)
