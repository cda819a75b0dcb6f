"""Hashes of the calls and numbers that made a sharded tensor, which the ranks compare.

Most calls exchange nothing. If one rank calls another function or passes another number, such as
one drawn by Python's random module, each block of the result belongs to another network, and no
message shows it. So each sharded tensor carries a hash of the call that made it: of the function,
its numbers, and the hashes of its argument tensors. The hashes of tensors that are exchanged, or
start a backward pass, enter a running hash of the group (`Ledger.history`), which the ranks compare
at the end of each backward pass.

A rank may make additional calls, for example to inspect a value: their results enter no hash of the
group. Sample groups may differ too, as with different augmentations. A rank
without others in its job hashes nothing.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import index
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import resolve_name

from pydist._loader import native
from pydist.comm.interface.ledger import (
    CAUSE,
    DIFFERENT,
    GROUP_SIZES,
    calling_module,
)
from pydist.errors import UsageError

_SAME = frozenset(
    "clone contiguous cpu cuda register_hook requires_grad_ retain_grad view_as".split()
)
"""Methods whose result is the same tensor: one rank may call them alone, as it may attributes."""
_CHANGES = frozenset(f"{name}.__get__" for name in ("H", "T", "data", "imag", "mH", "mT", "real"))
"""Attributes that return another tensor."""
_WRITING_OPERATORS = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor "
    "ilshift irshift".split()
)
_REMEMBERED = 256

_LEAST_HASH = 1 << 41
"""The least hash; smaller integers are numbers of the program."""
NO_HISTORY = _LEAST_HASH
"""The history of a tensor that no call has made."""
_UNSEEN = _LEAST_HASH + 1
"""The key of an argument that is not compared here."""
_NAN = math.pi * 1e300
_MOST_SHOWN = 16
"""Most elements of an integer array or tensor that is compared as numbers, such as indices."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

call_key = native.call_key
_codes: dict[object, int] = {}
_writes: set[object] = set()
"""Functions that write into their first argument, whose prior values need not be equal."""


class _RecentCall(NamedTuple):
    history: int
    func: Callable[..., Any]
    key: tuple[Any, ...]
    names: tuple[str, ...]
    module: str


class _Recent(threading.local):
    """The last calls of this rank, as tuples of `_RecentCall`; ranks can be threads."""

    def __init__(self) -> None:
        self.calls: deque[tuple[Any, ...]] = deque(maxlen=_REMEMBERED)


_recent = _Recent()


def history_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the hash of a program's call on sharded tensors, which is never 0."""
    if not GROUP_SIZES:
        return NO_HISTORY
    code = _codes.get(func)
    if code is None:
        code = _codes[func] = _code_of(func)
    if code == 0:
        return getattr(args[0], "_history", NO_HISTORY) if args else NO_HISTORY
    if func in _writes and args and not hasattr(args[0], "_history"):
        args = (None, *args[1:])
    key = call_key(code, args, Parameter, _KINDS, _key, _UNSEEN)
    names: tuple[str, ...] = ()
    if kwargs:
        names = tuple(kwargs) if len(kwargs) == 1 else tuple(sorted(kwargs))
        key += (_code_of_names(names), *_keys([kwargs[name] for name in names]))
    history = hash(key) | _LEAST_HASH
    CAUSE.module = calling_module()
    _recent.calls.append(
        (history, func, key, names, CAUSE.module)
    )  # a `_RecentCall`, in a tenth of the time
    return history


def history_of_input(history: int, before: int, forward: int) -> int:
    """Returns the hash of a model's input, which differs between training forwards.

    Args:
        history: of the caller's tensor.
        before: number of the training forward that the tensor belongs to.
        forward: number of the training forward that it enters.
    """
    return history if forward == before else hash((history, forward)) | _LEAST_HASH


def remember(result: Any, history: int, args: Sequence[Any]) -> None:
    """Sets the history of the new sharded tensors among a call's results."""
    if isinstance(result, Tensor):
        # `remember_change` handles a changed argument; an unchanged one keeps its history.
        if (not args or result is not args[0]) and hasattr(result, "_history"):
            result._history = history
    elif isinstance(result, (tuple, list)):
        for index, each in enumerate(result):
            _set(each, hash((history, index)) | _LEAST_HASH)


def remember_change(x: Tensor) -> None:
    """Sets the history of a sharded tensor that the running call changes in place."""
    if CAUSE.history:
        _set(x, CAUSE.history)


def also_made_by(history: int) -> None:
    """Adds another history to the running call's result, if a call is running."""
    if CAUSE.history:
        CAUSE.history = hash((CAUSE.history, history)) | _LEAST_HASH


def _set(result: Any, history: int) -> None:
    if hasattr(result, "_history"):
        result._history = history


def _code_of(func: Callable[..., Any]) -> int:
    name = resolve_name(func) or getattr(func, "__qualname__", "")
    method = name.removeprefix("torch.Tensor.")
    if method in _WRITING_OPERATORS or (method.endswith("_") and not method.endswith("__")):
        _writes.add(func)
    reads = method.endswith(("__get__", "__set__")) and method not in _CHANGES
    return 0 if reads or method in _SAME else crc32(name.encode()) or 1


@cache
def _code_of_names(names: tuple[str, ...]) -> int:
    return crc32(" ".join(names).encode()) * _LEAST_HASH


def _keys(values: Sequence[Any]) -> tuple[Any, ...]:
    return call_key(_UNSEEN, values, Parameter, _KINDS, _key, _UNSEEN)


def _key(value: Any) -> Any:
    """Returns the key of an argument that `call_key` does not know; equal on all ranks."""
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        # Python hashes -2 like -1, -0.0 like 0.0, and NaN differently each time.
        return math.nextafter(value, -math.inf) if value in (-2, 0) else _NAN
    if isinstance(value, (str, torch.dtype)):
        return crc32(str(value).encode()) * _LEAST_HASH
    if isinstance(value, (tuple, list)):  # long: only its hash is kept
        return hash(_keys(value)) | _LEAST_HASH
    return _keys(_parts(value))


def _parts(value: Any) -> tuple[Any, ...]:
    """Returns the numbers in an argument; other plain tensors are compared as operands."""
    if isinstance(value, Tensor):
        is_known = value.dim() == 0 or (
            value.dim() == 1 and value.dtype in _INTEGERS and len(value) <= _MOST_SHOWN
        )
        if (
            type(value) is Tensor
            and not value.requires_grad  # a loss of this rank's shard, or an operand
            and value.device.type == "cpu"
            and not value.is_sparse
            and is_known
        ):
            return (value.tolist(),)
        return (None,)
    if isinstance(value, (np.generic, np.ndarray)):
        return (value.tolist(),) if value.size <= _MOST_SHOWN else (None,)
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    return (index(value),)


_KINDS = (Tensor, np.generic, np.ndarray, complex, slice, tuple, list, str, torch.dtype)
"""Types that `_key` supports, in addition to everything that can be an index."""


@contextmanager
def caused_by(history: int) -> Iterator[None]:
    """Attributes exchanges within the context to calls with this hash."""
    before, CAUSE.history = CAUSE.history, CAUSE.history or history
    try:
        yield
    finally:
        CAUSE.history = before


def recent_calls() -> list[list[Any]]:
    """Returns the last calls of this rank, for the other ranks.

    Returns:
        The hash, the text and the argument tensors' hashes of each call.
    """
    calls = [_RecentCall(*each) for each in _recent.calls]
    return [[call.history, _text(call), repr(_without_numbers(call.key[1:]))] for call in calls]


def different_histories(heard: Mapping[int, list[list[Any]]]) -> UsageError:
    """Returns the error for ranks that compute different things; the same on all of them.

    Args:
        heard: `recent_calls` of each rank of the group.
    """
    first, *others = sorted(heard)
    advice = "give all ranks of a sample group the same numbers, as from generators with one seed"
    for other in others:
        pair = _first_difference(heard[first], heard[other])
        if pair is not None:
            here, there = pair
            return UsageError(
                f"{DIFFERENT}: {here} on rank {first} and {there} on rank {other}; {advice}"
            )
    return UsageError(
        f"{DIFFERENT}: the same calls in another order, as of backward passes, or others longer "
        f"ago than they remember; {advice}"
    )


def _first_difference(
    here: Sequence[Sequence[Any]], there: Sequence[Sequence[Any]]
) -> tuple[str, str] | None:
    """Describes where two ranks' calls diverge; `None` if they remember the same ones."""
    known_here, known_there = ({history for history, *_ in calls} for calls in (here, there))
    new_here = [call for call in here if call[0] not in known_there]
    new_there = [call for call in there if call[0] not in known_here]
    # One rank may make additional calls. The first differing call has equal argument tensors, and
    # mostly the same function; the other rank may also have made it in an earlier step.
    for ours, theirs in ((new_here, new_there), (new_here, there), (here, new_there)):
        for mine in ours:
            for its in reversed(theirs):
                if mine[0] != its[0] and _asked(mine) == _asked(its):
                    return mine[1], its[1]
    for mine in new_here:
        for its in new_there:
            if mine[2] == its[2]:
                return mine[1], its[1]
    if not (new_here or new_there):
        return None
    texts = [calls[0][1] if calls else "no such call" for calls in (new_here, new_there)]
    return texts[0], texts[1]


def _asked(call: Sequence[Any]) -> tuple[str, str]:
    """Returns the function of a call, and its arguments other than numbers."""
    return call[1].partition("(")[0], call[2]


def _text(call: _RecentCall) -> str:
    by_place = len(call.key) - len(call.names) - bool(call.names)  # the names' code is between
    given = [_shown(call.key[1:by_place])]
    for name, key in zip(call.names, call.key[by_place + 1 :], strict=True):
        shown = _shown([key])
        given.append(f"{name}={shown}" if shown else name)
    numbers = ", ".join(each for each in given if each)
    return f"{call.func.__name__}({numbers}){f' in module {call.module}' if call.module else ''}"


def _shown(keys: Sequence[Any]) -> str:
    return ", ".join(f"{each:.12g}" for each in _numbers(keys))


def _is_number(key: Any) -> bool:
    return not isinstance(key, tuple) and abs(key) < _LEAST_HASH


def _numbers(key: Any) -> Iterator[Any]:
    for each in key:
        if isinstance(each, tuple):
            yield from _numbers(each)
        elif _is_number(each):
            yield each


def _without_numbers(key: Any) -> Any:
    """Returns a call's arguments other than numbers: the hashes of tensors."""
    rest = (each for each in key if not _is_number(each))
    return tuple(_without_numbers(each) if isinstance(each, tuple) else each for each in rest)
