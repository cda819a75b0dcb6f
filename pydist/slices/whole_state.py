"""`WholeState`, a whole tensor of a model's state whose changes reach this rank's slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pydist.arguments import leaves, mapped
from pydist.errors import NotSupported
from pydist.tensor import ShardedTensor, local_of


class WholeCopy:
    """Copy of a whole sharded weight, with the slice of this rank, which it may set.

    Args:
        name: of the weight in the state.
        weight: the sharded weight.
        whole: the copy.
    """

    def __init__(self, name: str, weight: ShardedTensor, whole: Tensor) -> None:
        self.weight = weight
        self._name, self._whole, self._own = name, whole, local_of(weight).detach()
        self._version = self._own._version

    @property
    def is_current(self) -> bool:
        """Whether the slice has changed through this copy only."""
        return self._own._version == self._version

    @torch.no_grad()
    def write_back(self) -> None:
        """Sets the slice.

        Raises:
            NotSupported: it has changed since the copy was made, which the copy would undo.
        """
        if not self.is_current:
            raise NotSupported(
                f"a change of {self._name!r} in a state_dict() that is older than the last change "
                "of the sharded weight: take state_dict() again before changing it"
            )
        self._own.copy_(self._whole[self.weight.layout.box.slices])
        self._version = self._own._version


class WholeState(torch.Tensor):
    """Whole tensor, or a view of one, that the state of a model with sharded weights holds.

    In torch, what is written into the tensors of `state_dict()` reaches the parameters, as in
    `own[name].copy_(loaded)` and averages of models. A whole tensor is a copy, so a call that
    changes it sets this rank's slice, too. Other results, pickles and deep copies are plain
    tensors; arrays that share its memory are read-only.

    Attributes:
        plain: the tensor, plain.
        copied: the sharded weight that it is a copy of.
    """

    plain: Tensor
    copied: WholeCopy

    @staticmethod
    def __new__(cls, plain: Tensor, copied: WholeCopy) -> WholeState:
        """Wraps a plain tensor; the wrapper shares its memory."""
        found = plain.as_subclass(cls)
        found.plain, found.copied = plain, copied
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
                x.copied.write_back()
        if isinstance(result, np.ndarray) and any(_holds(x.plain, result) for x in states):
            result.flags.writeable = False
        memories = {x.plain.untyped_storage()._cdata: x.copied for x in states}

        def seen(value: Any) -> Any:
            for x in states:
                if x.plain is value:  # changed in place
                    return x
            copied = memories.get(_memory_of(value))
            return value if copied is None else cls(value, copied)

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
