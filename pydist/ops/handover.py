"""What two nodes of the graph that are one pass have to know of each other."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Handover(Generic[T]):
    """From the backward of a node to that of the node before.

    The gradient on the way is then not what it is to others, so it must be handed on only where
    nobody else sees it, and be the very tensor that arrives.
    """

    def __init__(self) -> None:
        self._given: tuple[Tensor, T] | None = None

    def give(self, grad: Tensor, what: T) -> None:
        """Leaves `what`; `grad` is what the node returns."""
        self._given = grad, what

    def take(self, grad: Tensor) -> T | None:
        """What was left with `grad`, `None` if that is an ordinary gradient."""
        given, self._given = self._given, None
        return given[1] if given is not None and given[0] is grad else None


def hook_on_saved() -> object | None:
    """What packs tensors that are saved for backward now (checkpointing, offloading), if anything.

    Calls under different hooks are not to be fused: the second may be run again, without the first.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]
