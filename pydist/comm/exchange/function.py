"""The base of pydist's autograd functions."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from pydist.comm.exchange.exchanger import in_memory


class Function(torch.autograd.Function):
    """An autograd function whose `backward` gets gradients with all values in memory.

    Where a formula of torch knows that a gradient is zero, or only its negative, the engine hands
    on a tensor without these values. That depends on the graph of one rank alone: a rank that
    passed such a tensor to native code would raise while the others communicate.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        backward: Any = cls.backward

        @wraps(backward)
        def with_memory(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *(None if g is None else in_memory(g) for g in grads))

        cls.backward = staticmethod(with_memory)  # type: ignore[method-assign]
