"""Normalizes dim arguments: negative dims, NumPy's names, and varargs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

_H = TypeVar("_H", bound=Callable[..., Any])


def canonical(dim: int, ndim: int) -> int:
    """Returns a dim counted from the front.

    Raises:
        IndexError: the tensor has no such dim.
    """
    bound = max(1, ndim)
    if not -bound <= dim < bound:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], "
            f"but got {dim})"
        )
    return dim % bound


def canonical_all(dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Returns dims counted from the front, in the given order.

    Raises:
        IndexError: the tensor has no such dim.
        RuntimeError: one is named twice.
    """
    found = tuple(canonical(d, ndim) for d in dims)
    if len(set(found)) != len(found):
        raise RuntimeError(f"dim {next(d for d in found if found.count(d) > 1)} appears twice")
    return found


def given_as(name: str, values: Sequence[Any], named: dict[str, Any]) -> Any:
    """Returns an argument given as `f(1, 2)`, `f((1, 2))`, `f(name=(1, 2))`, or one value."""
    if name in named:
        return named[name]
    return values[0] if len(values) == 1 else values


def numpy_names(handler: _H) -> _H:
    """Wraps a handler to accept `axis` for `dim` and `keepdims` for `keepdim`, as torch does."""

    @wraps(handler)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        for theirs, ours in (("axis", "dim"), ("keepdims", "keepdim")):
            if theirs in kwargs:
                kwargs[ours] = kwargs.pop(theirs)
        return handler(*args, **kwargs)

    return renamed  # type: ignore[return-value]  # of the handler's own type but for the names
