"""`WholeState`, a whole tensor of a model's state whose changes reach this rank's slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pydist.arguments import leaves, mapped


class WholeState(torch.Tensor):
    """Whole tensor, or a view of one, that the state of a model with sharded weights holds.

    In torch, what is written into the tensors of `state_dict()` reaches the parameters, as in
    `own[name].copy_(loaded)` and averages of models. A whole tensor is a copy, so a call that
    changes it sets this rank's slice, too. Other results, pickles and deep copies are plain
    tensors; arrays that share its memory are read-only.

    Attributes:
        plain: the tensor, plain.
        write_back: sets this rank's slice; raises `NotSupported` if the slice has changed since.
        weight: identifies the sharded weight.
    """

    plain: Tensor
    write_back: Callable[[], object]
    weight: int

    @staticmethod
    def __new__(
        cls, plain: Tensor, write_back: Callable[[], object], weight: int = 0
    ) -> WholeState:
        """Wraps a plain tensor; the wrapper shares its memory."""
        found = plain.as_subclass(cls)
        found.plain, found.write_back, found.weight = plain, write_back, weight
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        states = [x for x in leaves((args, kwargs or {})) if isinstance(x, WholeState)]
        before = [x.plain._version for x in states]
        result = func(*mapped(_plain, args), **mapped(_plain, dict(kwargs or {})))
        # Inference mode counts no changes.
        changes = torch.is_inference_mode_enabled() and _changes(func, kwargs or {})
        for x, version in zip(states, before, strict=True):
            if changes or x.plain._version != version:
                x.write_back()
        if isinstance(result, np.ndarray) and any(_holds(x.plain, result) for x in states):
            result.flags.writeable = False
        memories = {x.plain.untyped_storage()._cdata: x.write_back for x in states}

        def seen(value: Any) -> Any:
            for x in states:
                if x.plain is value:  # changed in place
                    return x
            write_back = memories.get(_memory_of(value))
            return value if write_back is None else cls(value, write_back)

        return mapped(seen, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.plain.detach().clone().requires_grad_(self.plain.requires_grad)
        if isinstance(self, nn.Parameter):  # of a plain model that was given the state
            copied = nn.Parameter(copied, self.plain.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, WholeState) else value


def _changes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and name[-2:] != "__") or "out" in kwargs


def _holds(x: Tensor, array: np.ndarray[Any, Any]) -> bool:
    start, at = x.untyped_storage().data_ptr(), array.__array_interface__["data"][0]
    return bool(start <= at < start + x.untyped_storage().nbytes())


def _memory_of(value: Any) -> int | None:
    if type(value) is not Tensor or value.layout != torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # of functional transforms
        return None
