"""Handles torch's own calls on the wrapper of a shard, and guards its gradient.

A wrapper has the global shape and no storage, and is not a node of the graph, which consists of
shards. Calls that would make it a node are refused here. Tensors in nested arguments of calls
are found and replaced here, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pydist.errors import NotSupported

_T: Any = Tensor  # the type stubs declare values where the class has descriptors
GET_DTYPE = _T.dtype.__get__
GET_DEVICE = _T.device.__get__
GET_REQUIRES_GRAD = _T.requires_grad.__get__
GET_GRAD_FN = _T.grad_fn.__get__
_SET_HOOKS = _T._backward_hooks.__set__


_impl: Any = torch._C._disabled_torch_function_impl


def of_wrapper(func: Callable[..., Any], *args: Any) -> Any:
    """Makes a torch call on the wrapper itself, which knows the global shape, dtype and device."""
    return _impl(func, (), args)


def refuse_foreign_graph(x: Tensor) -> None:
    """Raises if a wrapper has become a node of the graph.

    Raises:
        NotSupported: an `autograd.Function` was applied to the wrapper.
    """
    node = _impl(GET_GRAD_FN, (), (x,))  # as `of_wrapper`, for every operand of a call
    if node is not None:
        if node.name() == "CheckpointFunctionBackward":
            raise NotSupported(
                "CheckpointFunctionBackward: reentrant checkpointing hides the graph of shards; "
                "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        raise NotSupported(
            f"{node.name()} was applied to a sharded tensor itself, so its backward would be "
            "skipped: autograd.Function bypasses torch's overrides; apply it to x.to_local() and "
            "wrap the result with ShardedTensor.from_local"
        )


def _refuse_gradient(_: Tensor) -> Tensor:
    raise NotSupported(
        "a gradient arrived at a ShardedTensor itself instead of its shard: an autograd.Function "
        "was applied to a sharded tensor; apply it to x.to_local()"
    )


# One for all wrappers: registering a hook on each takes longer than making the wrapper.
_GUARDS = OrderedDict({0: _refuse_gradient})


def guard_gradient(wrapper: Tensor) -> None:
    """Makes a gradient that arrives at the wrapper raise."""
    _impl(_SET_HOOKS, (), (wrapper, _GUARDS))


def plain(tensor: Tensor) -> Tensor:
    """Returns a subclass that only adds to torch.Tensor, like MONAI's MetaTensor, as a Tensor.

    Raises:
        NotSupported: the subclass has no storage of its own.
    """
    kind = type(tensor)
    if kind is Tensor:
        return tensor
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise NotSupported(
            f"a {kind.__module__}.{kind.__name__} where a plain tensor is cut over the ranks: "
            "give its values as a plain tensor"
        )
    if kind.__torch_function__ is torch._C._disabled_torch_function_impl:
        return tensor  # a parameter or a buffer
    return tensor.as_subclass(Tensor)


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def replaced(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns nested tuples, lists, dicts and slices with all tensors replaced."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        parts = [replaced(fn, each) for each in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, Mapping):
        return {key: replaced(fn, each) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(replaced(fn, each) for each in (value.start, value.stop, value.step)))
    return value


def plain_operands(value: Any, kept: tuple[type, ...]) -> Any:
    """Returns arguments of a call, with subclasses other than `kept` as plain tensors."""
    return replaced(lambda x: x if type(x) in kept else plain(x), value)
