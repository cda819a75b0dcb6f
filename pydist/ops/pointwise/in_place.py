"""Makes in-place calls on a plain tensor with sharded arguments.

If all ranks hold the full result, such as a running mean updated with the mean of a sample, it is
written to the plain tensor's memory, which `.data`, views and NumPy arrays may share. The ranks
gather a result without gradient for memory that others see. In all other cases, a block of the
result per rank or a result with a gradient, the user's object becomes sharded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.errors import NotSupported
from pydist.layout import Layout
from pydist.tensor import ShardedTensor, refusal, wrap
from pydist.tensor.operands import shard_of_plain


def in_place_on_plain(
    handler: Callable[..., Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout,
) -> Tensor:
    """Runs an in-place call whose first argument is plain, on this rank's block of it.

    Writing to the plain tensor would fill only this rank's block, and record no gradient. So the
    user's object is swapped with a sharded tensor that holds the result.

    Args:
        handler: handles the call with a sharded first argument, as handler(func, sharded, ...).
        func: the call.
        args: arguments of the call; the first is a plain tensor.
        kwargs: keyword arguments of the call.
        layout: of the result, with the first argument's shape.

    Raises:
        NotSupported: the result has a gradient, and other objects share the tensor's memory or it
            is a parameter.
    """
    target: Tensor = args[0]
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    like = next(t for t in given if isinstance(t, ShardedTensor))
    if not trains and any(layout.splits):
        is_seen = torch.tensor([bool(_held_elsewhere(target) or _memory_elsewhere(target))])
        like.mesh.sample.all_reduce(is_seen)  # it may be seen on one rank alone, as by a logger
        if is_seen:
            layout = layout.whole()
    fills = not any(layout.splits) and not (trains and target.requires_grad)
    why = _held_elsewhere(target) if trains else ""
    why = why or ("" if fills else _memory_elsewhere(target))
    if why:
        why = f"in place on a plain tensor {why}, it would fill only this rank's block of it"
        raise refusal(func, args, kwargs, why)
    if layout.shape != tuple(target.shape):
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape "
            f"{list(layout.shape)}"
        )
    if func is not torch.Tensor.copy_:  # copy_ overwrites all values, which may differ
        block = shard_of_plain(target, layout)
        # A copy, as the tensor's own memory is freed after the swap.
        block = block.detach() if fills else block.clone()
    else:
        block = target.detach() if fills else target.new_empty(layout.local_shape)
    own = wrap(block, layout, like)
    result: ShardedTensor = handler(func, own, *args[1:], **kwargs)
    if fills and not trains:
        return target
    del own
    with torch._C.DisableTorchFunctionSubclass():
        try:
            torch.utils.swap_tensors(target, result)
        except RuntimeError as error:
            why = f"in place on a plain tensor that something else holds ({error})"
            raise NotSupported(f"{func.__name__}: {why}; write it out of place") from error
    return target  # swapped: the sharded tensor now


def _held_elsewhere(target: Tensor) -> str:
    """Returns the reason why a plain tensor can't be swapped, or "" if it can."""
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


def _memory_elsewhere(target: Tensor) -> str:
    """Returns the reason why a plain tensor can't change its memory, or "" if it can."""
    storage = target.untyped_storage()
    # Two uses are the tensor and `storage`; more are `.data`, `detach()` or arrays.
    used = torch._C._storage_Use_Count(storage._cdata)
    return "whose memory something else sees" if used > 2 or not storage.resizable() else ""
