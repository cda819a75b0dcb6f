"""Parts of leaves in the graph, which follow changes of a leaf's memory and `requires_grad`.

Autograd saves a leaf itself for backward. So it sees the memory that `p.data = ...` sets, and with
`create_graph` it checks in backward whether the leaf requires a gradient. A sharded call uses a
part of the leaf instead, with nodes that scale the gradient. Before a backward pass, these parts
are updated to the leaf's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version

from pydist.errors import UsageError
from pydist.exchange.function import Function
from pydist.exchange.link import Link

_FEW = 64


class _Alias(NamedTuple):
    """Tensor that shares memory with a part of a leaf.

    Attributes:
        part: shares the leaf's memory, but is not a view of the leaf for autograd.
        leaf: the leaf.
        index: of the part in the leaf; `None` for the full leaf.
        made: makes the part again, with a graph that leads to the leaf's current state.
        trains: whether the part leads to the leaf.
    """

    part: Link
    leaf: Link
    index: Any
    made: Callable[[Tensor], Tensor]
    trains: bool


class Aliases:
    """The parts that graphs hold, as weak references."""

    def __init__(self) -> None:
        self._parts: list[_Alias] = []
        self._most = _FEW

    def note(
        self, part: Tensor, leaf: Tensor, index: Any, made: Callable[[Tensor], Tensor]
    ) -> None:
        """Remembers a part.

        Args:
            part: the tensor that a call uses; frozen if the leaf is.
            leaf: the leaf.
            index: of the part in the leaf; `None` for the full leaf.
            made: makes the part from the leaf.
        """
        self._parts.append(_Alias(Link(part), Link(leaf), index, made, part.requires_grad))
        if len(self._parts) > self._most:  # forward passes without a backward
            self._parts = [each for each in self._parts if each.part() is not None]
            self._most = 2 * len(self._parts) + _FEW

    def renew(self, create_graph: bool) -> None:
        """Updates the parts to the current state of their leaves.

        Args:
            create_graph: whether the backward pass that begins can lead to the leaves.

        Raises:
            UsageError: a leaf has changed its shape, dtype or device.
        """
        alive = []
        for each in self._parts:
            part, leaf = each.part(), each.leaf()
            if part is None or leaf is None:
                continue
            now = leaf if each.index is None else leaf.data[each.index]
            if now.data_ptr() != part.data_ptr():
                if (now.shape, now.dtype, now.device) != (part.shape, part.dtype, part.device):
                    raise UsageError(
                        f"a parameter of shape {list(part.shape)} and {part.dtype} has become one "
                        f"of shape {list(now.shape)} and {now.dtype} between forward and backward: "
                        "change it before the forward pass or after backward()"
                    )
                part.data = now.data
            if create_graph and leaf.requires_grad is not each.trains:
                with torch.enable_grad(), preserve_version(part):
                    _Follow.apply(part, each.made(leaf) if leaf.requires_grad else None)
                alive.append(each._replace(trains=leaf.requires_grad))
            else:
                alive.append(each)
        self._parts = alive


class _Follow(Function):
    """Replaces the graph of a part, for later uses, by another tensor's or by an empty one."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, other: Tensor | None) -> Tensor:
        ctx.mark_dirty(part)
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        return None, grad if ctx.needs_input_grad[1] else None
