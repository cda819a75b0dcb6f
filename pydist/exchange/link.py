"""Weak references to tensors that torch may swap."""

from __future__ import annotations

import weakref

from torch import Tensor


class Link:
    """A weak reference to a tensor that can be undone, as torch swaps no tensor that has one."""

    __slots__ = ("__weakref__", "_reference")

    def __init__(self, tensor: Tensor) -> None:
        self._reference: _BackReference | None = None
        self.restore(tensor)

    def __call__(self) -> Tensor | None:
        """Returns the tensor, while it is alive."""
        tensor = None if self._reference is None else self._reference()
        if tensor is not None:
            # As torch.utils.weak.TensorWeakRef, which is slower.
            tensor._fix_weakref()  # type: ignore[attr-defined]
        return tensor

    def leads_to(self, tensor: Tensor) -> bool:
        """Returns whether the link refers to this tensor."""
        return self._reference is not None and self._reference() is tensor

    def undo(self) -> None:
        """Clears the reference, until `restore`."""
        self._reference = None

    def restore(self, tensor: Tensor) -> None:
        """Sets the reference to the tensor."""
        self._reference = _BackReference(tensor)
        self._reference.link = weakref.ref(self)


class _BackReference(weakref.ref[Tensor]):
    """A weak reference that knows its link."""

    __slots__ = ("link",)
    link: weakref.ref[Link]


def links_to(tensor: Tensor) -> list[Link]:
    """Returns all links to a tensor."""
    references = weakref.getweakrefs(tensor)
    links = [each.link() for each in references if isinstance(each, _BackReference)]
    return [link for link in links if link is not None]
