"""Writes a norm's result when it is used, so that a ReLU after it shares the pass.

Where that is an in-place ReLU, leaky or not, one pass over memory makes both: backward finds the
ReLU's sign from the norm's input, which it reads anyway. Only in place: otherwise the norm's own
result must be there as well. A PReLU, which is never in place, is made along with the norm too,
whose own result then waits on.

The norm's node of the graph, which exchanges sums in backward, is made in the norm's call in every
case, and the activation has a node of its own. So backward runs the same exchanges in the same
order on ranks that fuse and on ranks that do not.

A result waits only where its input can't change unseen: where that has not been handed out since it
was made, or is a copy made for the norm. Statistics, scale and shift are copied in the norm's call.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.fusion.handover import hook_on_saved
from pydist.tensor import ShardedTensor, local_of, wrap, wrap_new
from pydist.tensor.deferred import Deferred
from pydist.tensor.wrapper import refuse_foreign_graph


class Normalization(Protocol):
    """A norm whose statistics are known, such as `pydist.ops.normalization.norm.Normalization`."""

    x: Tensor
    """Its input, which has the result's memory format."""

    def node(self, out: Tensor) -> Tensor:
        """Returns `out` as the result in autograd's graph; the others fill it."""

    def result(self) -> Tensor:
        """Returns the result."""

    def write(self, out: Tensor) -> None:
        """Writes the result into `out`."""

    def with_relu(self, y: Tensor, negative_slope: float) -> Tensor:
        """Writes the result after a ReLU in place."""

    def parametric(self, y: Tensor, slope: Tensor) -> Tensor:
        """Returns the result after a PReLU."""


class DeferredNorm(Deferred):
    """The result of a norm that is still to be written.

    Args:
        norm: what it is.
        out: where it goes.
    """

    def __init__(self, norm: Normalization, out: Tensor) -> None:
        self._norm: Normalization | None = norm
        self._out = out
        self._read = False  # by a PReLU

    def complete(self) -> None:
        """Writes the result without a ReLU; does nothing when that has been done."""
        norm, self._norm = self._norm, None
        if norm is not None:
            norm.write(self._out)

    def with_relu(self, shard: Tensor, negative_slope: float) -> tuple[Tensor, None] | None:
        """The result after a ReLU in place, written in the same pass.

        Args:
            shard: the result without, in the graph.
            negative_slope: in [0, 1).

        Returns:
            the shard that takes its place, for which nothing is left to do; `None` if it is too
            late for that.
        """
        norm = self._fusible()
        # Without a graph to be made, the shard's own would be lost.
        if norm is None or (shard.requires_grad and not torch.is_grad_enabled()):
            return None
        self._norm = None
        return norm.with_relu(shard, negative_slope), None

    def parametric(self, shard: Tensor, slope: Tensor) -> Tensor | None:
        """The result after a PReLU, written without the one before.

        Args:
            shard: the result before, in the graph.
            slope: [1] or [C].

        Returns:
            a new shard; `None` if it is too late for that, or has been done.
        """
        norm = self._fusible()
        if norm is None:
            return None
        self._read = True
        return norm.parametric(shard, slope)

    def _fusible(self) -> Normalization | None:
        """The norm, if an activation may still be made along with it.

        Not under hooks on what is saved: a checkpoint may begin in between, and runs the activation
        again without the norm.
        """
        return None if self._read or hook_on_saved() is not None else self._norm


class _Before(Deferred):
    """Completes a pending norm before anything else may change its input."""

    def __init__(self, norm: DeferredNorm) -> None:
        self._norm = weakref.ref(norm)

    def complete(self) -> None:
        norm = self._norm()
        if norm is not None:
            norm.complete()


class Input(NamedTuple):
    """The input of a norm, with its shard.

    Attributes:
        tensor: as given.
        shard: its shard.
        is_new: whether that had not been handed out before.
    """

    tensor: ShardedTensor
    shard: Tensor
    is_new: bool


def taken(x: ShardedTensor) -> Input:
    """A norm's input."""
    is_new = x._deferred is not None
    return Input(x, local_of(x), is_new)


def normalized(norm: Normalization, layout: Layout, input: Input) -> ShardedTensor:
    """The result of a norm, written when it is used, or the input is.

    Args:
        norm: of the shard of `input`, or of a copy of that.
        layout: of the result.
        input: what was asked to be normalized.
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
    """The shard of PReLU(x), made in the pass that a pending norm x still has to make.

    Args:
        x: the tensor; if it is pending, it stays so.
        slope: [1] or [C].

    Returns:
        the new shard; `None` if there is nothing to fuse with, and nothing was done.
    """
    pending, shard = x._deferred, x._shard
    if not isinstance(pending, DeferredNorm) or slope.numel() not in (1, x.shape[1]):
        return None
    refuse_foreign_graph(x)
    dtype = slope.dtype
    if torch.is_autocast_enabled(shard.device.type):
        dtype = torch.prelu(shard.new_zeros(1), slope.detach()[:1]).dtype
    return pending.parametric(shard, slope) if dtype == shard.dtype else None
