"""Hands results over between the backward nodes of two fused calls."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pydist.errors import UsageError

T = TypeVar("T")


class Handover(Generic[T]):
    """Channel that passes a value from a node's backward to the backward of the preceding node.

    The tensor between the nodes is then not the true gradient. So a value may be given only if no
    other code sees that tensor and the preceding node runs, which must receive the same tensor.

    Attributes:
        is_shared: whether other code uses the tensor between the nodes in forward. Its gradients
            may then arrive as well, and nothing may be given.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self._given: tuple[Tensor, T] | None = None

    def give(self, grad: Tensor, what: T) -> None:
        """Stores `what` for `grad`, which the node returns; allowed only if `runs` is true."""
        self._given = grad, what

    def take(self, grad: Tensor) -> T | None:
        """Returns the value given with `grad`, or `None` if `grad` is an ordinary gradient.

        Raises:
            UsageError: a value was given, but another tensor has arrived.
        """
        given, self._given = self._given, None
        if given is None:
            return None
        if given[0] is not grad:
            raise UsageError(
                "a hook on a node of the graph has changed the gradient between two calls that "
                "pydist makes as one; register it on the tensor between them (register_hook)"
            )
        return given[1]


def runs(ctx: Any, argument: int) -> bool:
    """Returns whether the current backward runs the node that made an argument of this call.

    It does not if only gradients of other tensors are requested (`torch.autograd.grad`), and it
    continues without a gradient if none has arrived.
    """
    if not ctx.has_gradient:
        return False
    node = ctx.next_functions[argument][0]
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def hook_on_saved() -> object | None:
    """Returns the hook that packs saved tensors now (checkpointing, offloading), or `None`.

    Calls under different hooks must not be fused: the second may be rerun without the first.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
