"""Finds volumes in the arguments of a model, also nested in lists, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yields all values that are not containers, in order; visits each container once."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[Any]:
        items = _items(value)
        if items is None:
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            for _, each in items:
                yield from walk(each)

    for value in values:
        yield from walk(value)


def mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """Returns `value` with `fn` applied to its leaves; unchanged containers stay the same object.

    Changed containers become copies: the caller's objects do not change. Cycles are not followed.
    """
    return _mapped(fn, value, set())


def is_container(value: Any) -> bool:
    """Returns whether `leaves` treats a value as a container."""
    return _items(value) is not None


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the keys and values of a container; `None` for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def _mapped(fn: Callable[[Any], Any], value: Any, above: set[int]) -> Any:
    items = _items(value)
    if items is None:
        return fn(value)
    if id(value) in above:
        return value
    above.add(id(value))
    made = [(key, each, _mapped(fn, each, above)) for key, each in items]
    above.discard(id(value))
    changed = {key: new for key, each, new in made if new is not each}
    return _replaced(value, changed, [new for _, _, new in made]) if changed else value


def _replaced(value: Any, changed: dict[Any, Any], whole: list[Any]) -> Any:
    """Returns a copy of a container with some of its values replaced."""
    if isinstance(value, tuple):
        return value._make(whole) if hasattr(value, "_make") else type(value)(whole)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {**value, **changed}
    made = copy.copy(value)
    for key, new in changed.items():
        if isinstance(made, list | MutableMapping):
            made[key] = new
        else:
            object.__setattr__(made, key, new)
    return made
