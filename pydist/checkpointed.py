"""Finds which pass of a model is repeated in backward by a checkpoint of torch around the model.

Torch packs and unpacks what a checkpointed region saves by hooks, whose functions refer to an
object of that run of the region: the same one when the region is run and when it is repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.utils.checkpoint

_T = TypeVar("_T")

_RUN: type[Any] | None = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
_DEEPEST = 3
"""Functions within functions that are searched, as a decorator may be around a hook."""


class CheckpointedPasses(Generic[_T]):
    """Passes of a model in checkpointed regions, as long as these can be repeated."""

    def __init__(self) -> None:
        self._passes = weakref.WeakKeyDictionary[Any, list[_T]]()

    def add(self, described: _T) -> None:
        """Records a pass that begins now, if it is in a checkpointed region."""
        if (run := _running_region()) is not None:
            self._passes.setdefault(run, []).append(described)

    def repeated(self) -> _T | None:
        """Returns the pass that is repeated now; `None` if it is unknown, or one of several."""
        run = _running_region()
        found = [] if run is None else self._passes.get(run, [])
        return found[0] if len(found) == 1 else None


def _running_region() -> object | None:
    """Returns the object of the innermost checkpointed region that is run, or repeated, now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None or _RUN is None else _run_of(hooks[0], _DEEPEST)


def _run_of(function: Callable[..., Any], depth: int) -> object | None:
    """Returns the region's object that a function refers to."""
    for cell in getattr(function, "__closure__", None) or ():
        found = cell.cell_contents
        found = found() if isinstance(found, weakref.ref) else found
        if _RUN is not None and isinstance(found, _RUN):
            return found
        if depth and callable(found) and (inner := _run_of(found, depth - 1)) is not None:
            return inner
    return None
