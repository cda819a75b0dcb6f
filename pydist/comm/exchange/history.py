"""Which calls and numbers have made a sharded tensor, as a hash that the ranks compare.

Most calls exchange nothing. Where one rank calls another function or gives another number, as one
that Python's random module has drawn there, each block of the result is that of another network,
and no message shows it. So each sharded tensor carries a hash of the call that made it: of the
function, its numbers, and the hashes of the tensors that it was given. What an exchange sends and
what a backward pass starts from goes into a running hash of the group (`Ledger.history`), which the
ranks compare at the end of each backward pass.

A rank may make calls of its own, as one that looks at something does: their results reach neither.
Sample groups may differ too, as those with their own augmentation do.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.overrides import resolve_name

from pydist._loader import native
from pydist.comm.interface.ledger import CAUSE, DIFFERENT, calling_module
from pydist.errors import UsageError

_SAME = frozenset(
    "clone contiguous cpu cuda detach detach_ register_hook requires_grad_ retain_grad to "
    "view_as".split()
)
"""Methods whose result is the same tensor: one rank may call them alone, and read attributes."""
_CHANGES = frozenset(f"{name}.__get__" for name in ("H", "T", "imag", "mH", "mT", "real"))
"""Attributes that are other tensors."""
_REMEMBERED = 256

_LEAST_HASH = 1 << 41
"""Larger integers are hashes, and the others numbers of the program."""
NO_HISTORY = _LEAST_HASH
"""Of a tensor that no call has made."""
_UNSEEN = _LEAST_HASH + 1
"""In the place of an argument that is not compared here."""
_NAN = math.pi * 1e300

call_key = native.call_key
_codes: dict[object, int] = {}


_Call = tuple[int, Callable[..., Any], tuple[Any, ...], str]
"""History, function, key and module."""


class _Recent(threading.local):
    """The calls that this rank has made last; ranks can be threads."""

    def __init__(self) -> None:
        self.calls: deque[_Call] = deque(maxlen=_REMEMBERED)


_recent = _Recent()


def history_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The hash of a call on sharded tensors that a program makes; not 0."""
    code = _codes.get(func)
    if code is None:
        code = _codes[func] = _code_of(func)
    if code == 0:
        return getattr(args[0], "_history", NO_HISTORY) if args else NO_HISTORY
    key = call_key(code, args, _KINDS, _key, _UNSEEN)
    if kwargs:
        key += _keys((*kwargs, *kwargs.values()))
    history = hash(key) | _LEAST_HASH
    CAUSE.module = calling_module()
    _recent.calls.append((history, func, key, CAUSE.module))
    return history


def remember(result: Any, history: int, args: Sequence[Any]) -> None:
    """Notes on the new sharded tensors among a call's results what has made them."""
    if isinstance(result, Tensor):
        # What was changed in place is noted by `adopt_local`; else it is as it was.
        if not args or result is not args[0]:
            _set(result, history)
    elif isinstance(result, (tuple, list)):
        for index, each in enumerate(result):
            _set(each, hash((history, index)) | _LEAST_HASH)


def _set(result: Any, history: int) -> None:
    if hasattr(result, "_history"):
        result._history = history


def _code_of(func: Callable[..., Any]) -> int:
    name = resolve_name(func) or getattr(func, "__qualname__", "")
    method = name.removeprefix("torch.Tensor.")
    reads = method.endswith(("__get__", "__set__")) and method not in _CHANGES
    return 0 if reads or method in _SAME else crc32(name.encode()) or 1


def _keys(values: Sequence[Any]) -> tuple[Any, ...]:
    return call_key(_UNSEEN, values, _KINDS, _key, _UNSEEN)


def _key(value: Any) -> Any:
    """The key of an argument that `call_key` does not know: equal on all ranks, as is its hash."""
    if isinstance(value, np.number):
        return _keys((value.item(),))
    if isinstance(value, (int, float)):
        # -2 has the hash of -1, and NaN another one each time.
        return math.nextafter(value, 0) if value == -2 else _NAN
    if isinstance(value, complex):
        return _keys((value.real, value.imag))
    if isinstance(value, slice):
        return _keys((value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):  # long: only its hash is kept
        return hash(_keys(value)) | _LEAST_HASH
    return crc32(str(value).encode()) * _LEAST_HASH


_KINDS = (np.number, complex, slice, tuple, list, str, torch.dtype)
"""What `_key` knows."""


@contextmanager
def caused_by(history: int) -> Iterator[None]:
    """What is exchanged within was made by calls with this hash."""
    before, CAUSE.history = CAUSE.history, CAUSE.history or history
    try:
        yield
    finally:
        CAUSE.history = before


def recent_calls() -> list[list[Any]]:
    """The last calls of this rank, for the other ranks: hash, text, and what the call was given."""
    return [
        [history, _text(func.__name__, key, module), repr(_without_numbers(key[1:]))]
        for history, func, key, module in _recent.calls
    ]


def different_histories(heard: Mapping[int, list[list[Any]]]) -> UsageError:
    """The error for ranks that compute different things; the same on all of them.

    Args:
        heard: `recent_calls` of each rank of the group.
    """
    first, *others = sorted(heard)
    advice = "give all ranks of a sample group the same numbers, as from generators with one seed"
    for other in others:
        known, theirs = ({history for history, *_ in heard[rank]} for rank in (first, other))
        own = [call for call in heard[other] if call[0] not in known]
        for history, text, given in heard[first]:
            if history in theirs:
                continue
            # One rank may make calls of its own. That which differs was given what is equal.
            here = next((call for call in own if call[2] == given), None)
            if here is not None:
                return UsageError(
                    f"{DIFFERENT}: {text} on rank {first} and {here[1]} on rank {other}; {advice}"
                )
    return UsageError(f"{DIFFERENT}, and did so longer ago than they remember; {advice}")


def _text(name: str, key: Any, module: str) -> str:
    numbers = ", ".join(f"{each:g}" for each in _numbers(key[1:]))
    return f"{name}({numbers}){f' in module {module}' if module else ''}"


def _is_number(key: Any) -> bool:
    return not isinstance(key, tuple) and abs(key) < _LEAST_HASH


def _numbers(key: Any) -> Iterator[Any]:
    for each in key:
        if isinstance(each, tuple):
            yield from _numbers(each)
        elif _is_number(each):
            yield each


def _without_numbers(key: Any) -> Any:
    """What a call was given beside numbers: the hashes of tensors."""
    rest = (each for each in key if not _is_number(each))
    return tuple(_without_numbers(each) if isinstance(each, tuple) else each for each in rest)
