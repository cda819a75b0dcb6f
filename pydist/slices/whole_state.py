"""`WholeState`, a whole tensor of a model's state whose changes reach this rank's slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pydist.arguments import leaves, mapped


class WholeState(torch.Tensor):
    """Whole tensor, or a view of one, that the state of a model with sharded weights holds.

    In torch, what is written into the tensors of `state_dict()` reaches the parameters, as in
    `own[name].copy_(loaded)` and averages of models. A whole tensor is a copy, so a call that
    changes it sets this rank's slice, too. Other results, pickles and deep copies are plain
    tensors; arrays that share its memory are read-only.

    Attributes:
        plain: the tensor, plain.
        write_back: copies this rank's part of the whole tensor to its slice.
    """

    plain: Tensor
    write_back: Callable[[], object]

    @staticmethod
    def __new__(cls, plain: Tensor, write_back: Callable[[], object]) -> WholeState:
        """Wraps a plain tensor; the wrapper shares its memory."""
        found = plain.as_subclass(cls)
        found.plain, found.write_back = plain, write_back
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
        for x, version in zip(states, before, strict=True):
            if x.plain._version != version:
                x.write_back()
        if isinstance(result, np.ndarray):
            result.flags.writeable = False
        memories = {x.plain.untyped_storage()._cdata: x.write_back for x in states}

        def seen(value: Any) -> Any:
            if type(value) is not Tensor or value.layout != torch.strided:
                return value
            for x in states:
                if x.plain is value:  # changed in place
                    return x
            write_back = memories.get(value.untyped_storage()._cdata)
            return value if write_back is None else cls(value, write_back)

        return mapped(seen, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self.plain.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, WholeState) else value
