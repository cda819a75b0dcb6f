"""Registers what higher layers add to sharded tensors: handlers of calls, and an observer.

Sharded tensors know neither the operators nor the code that averages gradients over the ranks.
`pydist.ops` registers a handler for each torch call, and `pydist.gradients.registration` as the
observer of plain tensors that enter or leave the graph of sharded ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from pydist.group_sizes import GroupSizes
    from pydist.layout import Layout
    from pydist.mesh import Mesh

HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Registry of the handlers of torch calls, which the modules of `pydist.ops` fill."""

_H = TypeVar("_H", bound=Callable[..., Any])


def implements(*functions: Callable[..., Any]) -> Callable[[_H], _H]:
    """Registers the decorated function as the handler of torch calls.

    The handler gets the arguments of the call unchanged, so it has the torch function's signature.
    """

    def register(handler: _H) -> _H:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


OUTER: set[type] = set()
"""Classes of tensors that contain sharded ones; in a call with both, their override computes it."""


def load() -> None:
    """Imports what registers here; waits if another thread is importing it."""
    importlib.import_module("pydist.ops")


class Observer(Protocol):
    """Interface that is notified of plain tensors in the graph of sharded ones."""

    @property
    def gradient_placeholder(self) -> type[Tensor]:
        """Class of the placeholders for partitioned gradients, which handlers get unchanged."""

    def follow(self, tensor: Tensor, mesh: Mesh) -> None:
        """Registers a sharded call's plain operand, or the parameters it was computed from."""

    def use_as_parameter(self, tensor: Tensor, mesh: Mesh) -> None:
        """Records that a plain tensor is used as the parameter of a layer."""

    def note_part(
        self,
        part: Tensor,
        leaf: Tensor,
        index: tuple[slice, ...] | None,
        made: Callable[[Tensor], Tensor],
        mesh: Mesh,
    ) -> None:
        """Records the part of a leaf that a call uses; it follows the leaf until backward.

        Args:
            part: the tensor that the call uses; frozen if the leaf is.
            leaf: the leaf.
            index: of the part in the leaf; `None` for the full leaf.
            made: makes the part from the leaf.
            mesh: the mesh.
        """

    def lead_to(
        self,
        tensor: Tensor,
        mesh: Mesh,
        history: int,
        sizes: GroupSizes,
        shard_in: Layout | None = None,
    ) -> None:
        """Records that a plain result was computed from sharded tensors alone, and their history.

        Args:
            tensor: the result.
            mesh: of the sharded tensors.
            history: see `pydist.exchange.history`.
            sizes: of their batch.
            shard_in: the layout, if the result is this rank's shard.
        """

    def scale_leaving_gradients(self, local: Tensor, layout: Layout) -> Tensor:
        """Scales the gradients that leave a shard's graph for tensors that all ranks have.

        Args:
            local: the shard from which a program makes a sharded tensor.
            layout: of the sharded tensor.
        """


class _Loaded:
    """The observer's functions, which are loaded when one is first called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        load()
        return object.__getattribute__(self, name)


observer: Observer = _Loaded()
"""The observer of all sharded tensors."""


def observe_with(chosen: Observer) -> None:
    """Sets the observer of all sharded tensors."""
    for name in vars(Observer):
        if not name.startswith("_"):
            setattr(observer, name, getattr(chosen, name))
