"""Passes results between the backward nodes of two calls that were fused."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pydist.errors import UsageError

T = TypeVar("T")


class Handover(Generic[T]):
    """Hands a value from a node's backward to the backward of the node before it.

    The gradient on the way is then not what it is to others, so it must be handed on only where
    nobody else sees it, to a node that runs, and be the very tensor that arrives.

    Attributes:
        is_shared: whether others have asked for what lies between the nodes, so that gradients of
            theirs may arrive as well, and nothing may be given.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self._given: tuple[Tensor, T] | None = None

    def give(self, grad: Tensor, what: T) -> None:
        """Leaves `what` with `grad`, which the node returns; only where `runs` is true."""
        self._given = grad, what

    def take(self, grad: Tensor) -> T | None:
        """What was left with `grad`, `None` if that is an ordinary gradient.

        Raises:
            UsageError: something was left, and another tensor has arrived.
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
    """Whether the backward under way goes on to the node that made an argument of this one's call.

    It does not where gradients of other tensors alone are asked for (`torch.autograd.grad`), and
    goes on without a gradient where none has arrived.
    """
    if not ctx.has_gradient:
        return False
    node = ctx.next_functions[argument][0]
    return node is not None and bool(torch._C._will_engine_execute_node(node))


def hook_on_saved() -> object | None:
    """Returns the hook that packs saved tensors now (checkpointing, offloading), or `None`.

    Calls under different hooks are not to be fused: the second may be run again, without the first.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
