"""Computes shapes of calls' results on torch's meta device, and remembers them.

torch computes some of them in Python, which takes up to milliseconds, and every stage needs those
of all calls in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydist.tensor.wrapper import replaced, tensors_of

_PLAIN = (
    int, float, complex, str, type(None), type(Ellipsis), torch.dtype, torch.layout,
    torch.memory_format, torch.device,
)  # fmt: skip


_MOST = 10_000


class Same(NamedTuple):
    """A result that is an argument of the call."""

    argument: int


class ViewOf(NamedTuple):
    """A result that shares the memory of an argument, or of an earlier result."""

    tensor: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class New(NamedTuple):
    """Result that has new memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Shapes:
    """Cache that maps the arguments of calls on meta tensors to their results."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, list[int]]] = {}

    def result(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        compute: Callable[[], Any],
    ) -> tuple[Any, list[int]]:
        """Returns the result of a call on meta tensors, with new or given tensors in it.

        Args:
            func: the function.
            args: its arguments, with meta tensors.
            kwargs: its keyword arguments.
            compute: makes the call.

        Returns:
            The result, and the indices of the tensors among the arguments that the call changes.
        """
        tensors: list[Tensor] = []
        key: Hashable = None
        try:
            key = (func, _key(args, tensors), _key(dict(kwargs), tensors), _sharing(tensors))
            found = self._known.get(key)
        except TypeError:  # an argument of another type
            found, key, tensors = None, None, tensors_of((args, kwargs))
        if found is not None:
            recipe, changed = found
            for i in changed:
                torch.autograd.graph.increment_version(tensors[i])
            return _made(recipe, list(tensors)), changed
        before, forms = [each._version for each in tensors], list(map(_form, tensors))
        result = compute()
        changed = [i for i, n in enumerate(before) if tensors[i]._version != n]
        if forms != list(map(_form, tensors)):  # as unsqueeze_ does: no recipe for arguments
            return result, changed
        if len(self._known) > _MOST:  # of calls with other numbers each time
            self._known.clear()
        if key is not None and all(x.layout == torch.strided for x in tensors_of(result)):
            self._known[key] = _recipe(result, list(tensors)), changed
        return result, changed


def is_differentiable(x: Tensor) -> bool:
    """Returns whether a tensor of this dtype can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def _key(value: Any, tensors: list[Tensor]) -> Hashable:
    """Returns a key of an argument; adds its tensors to a list.

    Raises:
        TypeError: the argument is of a type that may change.
    """
    if isinstance(value, Tensor):
        for i, each in enumerate(tensors):
            if each is value:
                return Same(i)
        tensors.append(value)
        return _form(value)
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, value  # True is no 1
    if kind is slice:
        return kind, _key((value.start, value.stop, value.step), tensors)
    if kind in (tuple, list, torch.Size):
        return kind, tuple(_key(each, tensors) for each in value)
    if kind is dict:
        return kind, tuple((name, _key(each, tensors)) for name, each in value.items())
    raise TypeError(kind)


def _form(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


def _sharing(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the index of the first tensor with the same memory, for each tensor."""
    storages = [each.untyped_storage()._cdata for each in tensors]
    return tuple(map(storages.index, storages))


def _recipe(value: Any, tensors: list[Tensor]) -> Any:
    """Returns a result with descriptions in the places of its tensors."""

    def described(x: Tensor) -> Any:
        storage = x.untyped_storage()._cdata
        for i, each in enumerate(tensors):
            if each is x:
                return Same(i)
        size, stride = tuple(x.shape), x.stride()
        for i, each in enumerate(tensors):
            if each.untyped_storage()._cdata == storage:
                return ViewOf(i, size, stride, int(x.storage_offset()), x.dtype)
        tensors.append(x)
        return New(size, stride, x.dtype)

    return _Recipe(replaced(described, value))


class _Recipe(NamedTuple):
    """The structure of a result; a class of its own, as its parts are tuples too."""

    structure: Any


def _made(recipe: _Recipe, tensors: list[Tensor]) -> Any:
    """Returns the result that a recipe describes."""

    def made(value: Any) -> Any:
        if isinstance(value, Same):
            return tensors[value.argument]
        if isinstance(value, ViewOf):
            base = tensors[value.tensor]
            if base.dtype != value.dtype:  # of all its memory, as it may not be contiguous
                elements = base.untyped_storage().nbytes() // base.element_size()
                base = base.as_strided((elements,), (1,), 0).view(value.dtype)
            return base.as_strided(value.size, value.stride, value.offset)
        if isinstance(value, New):
            x = torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")
            tensors.append(x)
            return x
        if isinstance(value, tuple | list):
            parts = [made(each) for each in value]
            return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
        if isinstance(value, Mapping):
            return {key: made(each) for key, each in value.items()}
        return value

    with torch.inference_mode(False), torch.no_grad():
        return made(recipe.structure)
