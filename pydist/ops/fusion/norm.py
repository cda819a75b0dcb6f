"""Deferred results of norms, written on first use, so that a ReLU after the norm shares the pass.

For an in-place ReLU, leaky or not, one pass over memory computes both: backward derives the ReLU's
sign from the norm's input, which it reads anyway. Other ReLUs are not fused, as the norm's own
result must exist as well. A PReLU, which is never in place, is also computed together with the
norm, whose own result stays deferred.

The norm's call always makes the norm's graph node, which exchanges sums in backward, and the
activation has its own node. So backward runs the same exchanges in the same order on ranks that
fuse and on ranks that do not.

A result is deferred only if its input can't change unnoticed: the input has not been handed out
since it was made, or is a copy made for the norm. The norm's call copies statistics, scale and
shift.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pydist.exchange.exchanger import stream_of
from pydist.layout import Layout
from pydist.ops.dtypes import result_dtype
from pydist.ops.fusion.handover import hook_on_saved
from pydist.tensor import ShardedTensor, local_of, wrap, wrap_new
from pydist.tensor.deferred import Deferred, on_stream
from pydist.tensor.wrapper import refuse_foreign_graph


class NormLike(Protocol):
    """Interface that fused norms share, such as `pydist.ops.norm.norm.AppliedNorm`."""

    x: Tensor
    """Input of the norm, which has the result's memory format."""

    def node(self, out: Tensor) -> Tensor:
        """Returns `out` as the result in autograd's graph; the other methods fill it."""

    def result(self) -> Tensor:
        """Returns the result."""

    def write(self, out: Tensor) -> None:
        """Writes the result into `out`."""

    def with_relu(self, y: Tensor, negative_slope: float) -> Tensor:
        """Writes the result after a ReLU in place."""

    def parametric(self, y: Tensor, slope: Tensor) -> Tensor:
        """Returns the result after a PReLU."""


class DeferredNorm(Deferred):
    """Result of a norm that is not written yet.

    Args:
        norm: computes the result.
        out: memory of the result.
    """

    def __init__(self, norm: NormLike, out: Tensor) -> None:
        self._norm: NormLike | None = norm
        self._out = out
        self._stream = stream_of(out)
        self._read = False  # by a PReLU

    def complete(self) -> torch.cuda.Stream | None:
        """Writes the result without a ReLU, if it is not written yet."""
        norm, self._norm = self._norm, None
        with on_stream(self._stream):
            if norm is not None:
                norm.write(self._out)
        return self._stream

    def with_relu(self, shard: Tensor, negative_slope: float) -> tuple[Tensor, None] | None:
        """Writes the result after an in-place ReLU, in one pass.

        Args:
            shard: the result before the ReLU, in the graph.
            negative_slope: in [0, 1).

        Returns:
            the shard that replaces `shard`, with no deferred work left; `None` if the calls can no
            longer be fused.
        """
        norm = self._fusible()
        # Where autograd records no graph, the shard's graph would be lost.
        if norm is None or (shard.requires_grad and not torch.is_grad_enabled()):
            return None
        self._norm = None
        return norm.with_relu(shard, negative_slope), None

    def parametric(self, shard: Tensor, slope: Tensor) -> Tensor | None:
        """Computes the result after a PReLU, without writing the norm's result.

        Args:
            shard: the result before the PReLU, in the graph.
            slope: [1] or [C].

        Returns:
            a new shard; `None` if the calls can no longer be fused, or already were.
        """
        norm = self._fusible()
        if norm is None:
            return None
        self._read = True
        return norm.parametric(shard, slope)

    def _fusible(self) -> NormLike | None:
        """Returns the norm, if an activation can still be fused with it.

        It can't on another stream than the norm's. It can't under saved-tensor hooks: a checkpoint
        may begin between the two calls, and reruns the activation without the norm.
        """
        if self._read or hook_on_saved() is not None or stream_of(self._out) != self._stream:
            return None
        return self._norm


class _Before(Deferred):
    """Deferred work of a norm's input: it completes the norm before the input may change."""

    def __init__(self, norm: DeferredNorm) -> None:
        self._norm = weakref.ref(norm)

    def complete(self) -> torch.cuda.Stream | None:
        norm = self._norm()
        return None if norm is None else norm.complete()


class Input(NamedTuple):
    """Input that a norm reads, with its shard.

    Attributes:
        tensor: the input as given.
        shard: its shard.
        is_new: whether the shard had not been handed out before.
    """

    tensor: ShardedTensor
    shard: Tensor
    is_new: bool


def take_input(x: ShardedTensor) -> Input:
    """Returns a norm's input, with its shard handed out."""
    is_new = x._deferred is not None
    return Input(x, local_of(x), is_new)


def normalized(norm: NormLike, layout: Layout, input: Input) -> ShardedTensor:
    """Returns the result of a norm, written when the result or the input is first used.

    Args:
        norm: of the shard of `input`, or of a copy of the shard.
        layout: of the result.
        input: the norm's input.
    """
    is_copy = norm.x is not input.shard
    is_safe = is_copy or input.is_new
    if not is_safe or norm.x.is_inference() or hook_on_saved() is not None:
        return wrap_new(norm.result(), layout, input.tensor)
    out = torch.empty_like(norm.x)
    result = wrap(norm.node(out), layout, input.tensor)
    pending = result._deferred = DeferredNorm(norm, out)
    if not is_copy:
        input.tensor._deferred = _Before(pending)
    return result


def parametric(x: ShardedTensor, slope: Tensor) -> Tensor | None:
    """Computes PReLU(x) in one pass with the deferred norm x.

    Args:
        x: the tensor; a deferred norm stays deferred.
        slope: [1] or [C].

    Returns:
        the new shard; `None`, without any effect, if there is nothing to fuse with.
    """
    pending, shard = x._deferred, x._shard
    if not isinstance(pending, DeferredNorm) or slope.numel() not in (1, x.shape[1]):
        return None
    refuse_foreign_graph(x)
    dtype = slope.dtype
    if torch.is_autocast_enabled(shard.device.type):
        dtype = result_dtype(torch.prelu, ((1,), shard), ((1,), slope))
    return pending.parametric(shard, slope) if dtype == shard.dtype else None
