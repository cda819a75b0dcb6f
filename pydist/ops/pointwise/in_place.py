"""Calls in place on a plain tensor with sharded arguments: the user's object becomes sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.errors import NotSupported
from pydist.layout import Layout
from pydist.ops.redistribute import shard_of_plain
from pydist.tensor import ShardedTensor, refusal, wrap


def in_place_on_plain(
    handler: Callable[..., Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout,
) -> ShardedTensor:
    """Runs a call in place whose first argument is plain, on the block of it that is this rank's.

    Filled as it lies, the plain tensor would hold the result in this rank's block alone. So the
    object in the user's hands is exchanged for a sharded one, in which the result is.

    Args:
        handler: what does it when the first argument is sharded, called as
            handler(func, sharded, ...).
        func: the call.
        args: its arguments, the first one a plain tensor.
        kwargs: likewise.
        layout: in which the result is to lie, of the first argument's shape.

    Raises:
        NotSupported: something else sees the tensor's memory, or it is a parameter.
    """
    target: Tensor = args[0]
    why = _held_elsewhere(target)
    if why:
        why = f"in place on a plain tensor {why}, it would fill only this rank's block of it"
        raise refusal(func, args, kwargs, why)
    if layout.shape != tuple(target.shape):
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape "
            f"{list(layout.shape)}"
        )
    like = next(a for a in (*args, *kwargs.values()) if isinstance(a, ShardedTensor))
    if func is torch.Tensor.copy_:
        block = target.new_empty(layout.local_shape)  # what is overwritten may differ
    else:
        # A copy: the tensor's own memory goes with its last user.
        block = shard_of_plain(target, layout).clone()
    own = wrap(block, layout, like)
    result: ShardedTensor = handler(func, own, *args[1:], **kwargs)
    del own
    with torch._C.DisableTorchFunctionSubclass():
        try:
            torch.utils.swap_tensors(target, result)
        except RuntimeError as error:
            why = f"in place on a plain tensor that something else holds ({error})"
            raise NotSupported(f"{func.__name__}: {why}; write it out of place") from error
    return target  # type: ignore[return-value]  # swapped: it is the sharded one now


def _held_elsewhere(target: Tensor) -> str:
    """Why a plain tensor can't be exchanged, "" if it can."""
    if type(target) is not Tensor:
        return f"that is a {type(target).__name__}"
    if target._is_view():
        return "that is a view of another"
    if weakref.getweakrefs(target):
        return "with weak references"
    users: int = target._use_count()  # type: ignore[attr-defined]  # not in torch's stubs
    if users > (2 if target.requires_grad and target.is_leaf else 1):
        return "of which there are views"
    if target.requires_grad and target.is_leaf and torch.is_grad_enabled():
        return "that is a leaf and requires a gradient"
    return ""
