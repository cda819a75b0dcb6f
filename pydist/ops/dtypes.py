"""Dtype checks, so that a call on split tensors accepts no more dtype pairs than torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.errors import UsageError

_NARROW = (torch.float16, torch.bfloat16)


def require_same(function: Callable[..., Any], x: Tensor, *parameters: Tensor | None) -> None:
    """Raises `UsageError` unless all parameters have the dtype of `x`."""
    for each in parameters:
        if each is not None and each.dtype != x.dtype:
            raise _refusal(function, x, each, "they must have the same type")


def require_fitting(function: Callable[..., Any], x: Tensor, *parameters: Tensor | None) -> None:
    """Raises `UsageError` unless torch accepts the dtypes of a norm's parameters with `x`."""
    if torch.is_autocast_enabled(x.device.type):
        return  # autocast has its own rules
    for each in parameters:
        mixed = x.dtype in _NARROW and each is not None and each.dtype == torch.float32
        if each is not None and each.dtype != x.dtype and not mixed:
            rule = "they must have the same type, or float32 with float16 or bfloat16 input"
            raise _refusal(function, x, each, rule)


def _refusal(function: Callable[..., Any], x: Tensor, parameter: Tensor, rule: str) -> UsageError:
    return UsageError(
        f"{function.__name__}: input of {x.dtype} and parameters of {parameter.dtype}; {rule}: "
        "x.to(weight.dtype) or torch.autocast do that"
    )
