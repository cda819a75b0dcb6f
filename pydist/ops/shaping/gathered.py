"""Calls whose result has no position in the sample, and is plain and equal on all ranks.

Each rank gathers the operands and computes all, or the ranks combine their answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.ops.pointwise.elementwise import elementwise
from pydist.tensor import HANDLERS, implements, refusal, source_among
from pydist.tensor.operands import whole_operand


def _gathered(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("out") is not None:
        raise refusal(func, args, kwargs, "out= would fill a gathered copy")
    like = source_among((*args, *kwargs.values()))
    whole = partial(whole_operand, like=like)
    return func(*map(whole, args), **{name: whole(each) for name, each in kwargs.items()})


for _name in ("masked_select", "unique", "unique_consecutive", "histogram"):
    for _owner in (torch, torch.Tensor):
        _func = getattr(_owner, _name)
        HANDLERS[_func] = partial(_gathered, _func)


@implements(torch.equal, torch.Tensor.equal)
def equal(input: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same shape and values."""
    return input.shape == other.shape and bool(elementwise(torch.eq, input, other).all())


@implements(torch.allclose, torch.Tensor.allclose)
def allclose(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Returns whether all elements of two tensors are close."""
    return bool(elementwise(torch.isclose, input, other, *args, **kwargs).all())
