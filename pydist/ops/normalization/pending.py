"""Results of norms that are written when somebody asks for them: by then a ReLU may be behind.

Where that is an in-place ReLU, leaky or not, one pass over memory makes both, and one node of the
graph stands for both: backward finds the ReLU's sign from the norm's input, which it reads anyway.
Only in place: otherwise the norm's own result must be there as well. A PReLU, which is never in
place, is made along with the norm too, whose own result then waits on for somebody who asks.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from pydist.errors import UsageError
from pydist.layout import Layout
from pydist.ops.handover import hook_on_saved
from pydist.ops.normalization.norm import Normalization
from pydist.ops.normalization.prelu import regain
from pydist.tensor import ShardedTensor, wrap


class PendingNorm:
    """The result of a norm that is still to be written.

    Args:
        norm: what it is.
        out: where it goes.
    """

    def __init__(self, norm: Normalization, out: Tensor) -> None:
        self._norm: Normalization | None = norm
        self._out = out
        self._version = norm.x._version
        self._read = False  # by a PReLU
        self._hook = hook_on_saved()

    def complete(self) -> None:
        """Writes the result without a ReLU; does nothing when that has been done."""
        if self._norm is not None:
            self._take().write(self._out)

    def rectified(self, shard: Tensor, negative_slope: float) -> tuple[Tensor, None] | None:
        """The result behind a ReLU in place, written in the same pass.

        Args:
            shard: the result without, in the graph.
            negative_slope: in [0, 1).

        Returns:
            the shard that takes its place, for which nothing is left to do; `None` if it is too
            late for that.
        """
        # Without a graph to be made, the shard's own would be lost.
        if self._norm is None or self._read:
            return None
        if shard.requires_grad and not torch.is_grad_enabled():
            return None
        # A norm made under no_grad is a constant, wherever its ReLU is.
        with torch.set_grad_enabled(shard.requires_grad):
            return self._take().result(self._out, negative_slope), None

    def parametric(self, shard: Tensor, slope: Tensor) -> Tensor | None:
        """The result behind a PReLU, written without the one before.

        Args:
            shard: the result before, in the graph.
            slope: [1] or [C].

        Returns:
            a new shard; `None` if it is too late for that, or has been done.
        """
        if self._norm is None or self._read or hook_on_saved() is not self._hook:
            return None
        norm = self._checked(self._norm)
        self._read = True
        return norm.parametric(shard, slope)

    def _take(self) -> Normalization:
        norm, self._norm = self._norm, None
        assert norm is not None
        return self._checked(norm)

    def _checked(self, norm: Normalization) -> Normalization:
        if norm.x._version != self._version:
            regain(self._out)
            with torch.no_grad():
                self._out.fill_(math.nan)  # should somebody go on in spite of the error
            raise UsageError(
                "the input of a norm was changed in place, through another tensor that shares its "
                "memory, before the norm's result was used; change a clone() of it"
            )
        return norm


class _Before:
    """Completes a pending norm before somebody else may change its input."""

    def __init__(self, norm: PendingNorm) -> None:
        self._norm = weakref.ref(norm)

    def complete(self) -> None:
        norm = self._norm()
        if norm is not None:
            norm.complete()

    def rectified(self, shard: Tensor, negative_slope: float) -> None:
        return None


def normalized(norm: Normalization, layout: Layout, input: ShardedTensor) -> ShardedTensor:
    """The result of a norm of `input`, written when it is asked for, or the input is.

    Args:
        norm: of the shard of `input`, or of a copy of that.
        layout: of the result.
        input: what was asked to be normalised.
    """
    if norm.x.is_inference() or not (norm.learns or _is_sole_user(norm.x)):
        # Others may change its memory; inference tensors would not even say so. Where something
        # learns, torch forbids it too.
        return wrap(norm.result(), layout, input)
    out = torch.empty_like(norm.x)
    result = wrap(norm.node(out), layout, input)
    pending = PendingNorm(norm, out)
    result._pending, input._pending = pending, _Before(pending)
    return result


def parametric(x: ShardedTensor, slope: Tensor) -> Tensor | None:
    """The shard of PReLU(x), made in the pass that a pending norm x still has to make.

    Args:
        x: the tensor; if it is pending, it stays so.
        slope: [1] or [C].

    Returns:
        the new shard; `None` if there is nothing to fuse with, and nothing was done.
    """
    pending, shard = x._pending, x._shard
    if not isinstance(pending, PendingNorm) or slope.numel() not in (1, x.shape[1]):
        return None
    dtype = slope.dtype
    if torch.is_autocast_enabled(shard.device.type):
        dtype = torch.prelu(shard.new_zeros(1), slope.detach()[:1]).dtype
    return pending.parametric(shard, slope) if dtype == shard.dtype else None


def _is_sole_user(x: Tensor) -> bool:
    """Whether no other tensor shares the memory of `x`, as a view of it or of what it views."""
    # One use is the tensor's, one that of the object that is asked here.
    storage = x.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2
