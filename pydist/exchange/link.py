"""Weak references to tensors that torch may swap."""

from __future__ import annotations

import weakref

from torch import Tensor


class Link:
    """A weak reference to a tensor; it can be undone, as torch swaps no tensor that has one."""

    __slots__ = ("__weakref__", "_reference")

    def __init__(self, tensor: Tensor) -> None:
        self._reference: _Reference | None = None
        self.restore(tensor)

    def __call__(self) -> Tensor | None:
        """The tensor, while it lives."""
        tensor = None if self._reference is None else self._reference()
        if tensor is not None:
            # What torch.utils.weak.TensorWeakRef does, which takes longer.
            tensor._fix_weakref()  # type: ignore[attr-defined]
        return tensor

    def leads_to(self, tensor: Tensor) -> bool:
        """Whether it is a reference to this tensor."""
        return self._reference is not None and self._reference() is tensor

    def undo(self) -> None:
        """Refers to nothing, until `restore`."""
        self._reference = None

    def restore(self, tensor: Tensor) -> None:
        """Refers to the tensor."""
        self._reference = _Reference(tensor)
        self._reference.link = weakref.ref(self)


class _Reference(weakref.ref[Tensor]):
    """Knows the link that it belongs to."""

    __slots__ = ("link",)
    link: weakref.ref[Link]


def links_to(tensor: Tensor) -> list[Link]:
    """All links to a tensor."""
    references = weakref.getweakrefs(tensor)
    links = [each.link() for each in references if isinstance(each, _Reference)]
    return [link for link in links if link is not None]
