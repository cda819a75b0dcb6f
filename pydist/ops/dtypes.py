"""Dtypes of results, and checks that a call on split tensors accepts no more pairs than torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.errors import UsageError

NARROW = (torch.float16, torch.bfloat16)
"""Types of 16 bits, whose sums are computed in float32."""


def require_same_dtype(function: Callable[..., Any], x: Tensor, *parameters: Tensor | None) -> None:
    """Raises `UsageError` unless all parameters have the dtype of `x`."""
    for each in parameters:
        if each is not None and each.dtype != x.dtype:
            raise _refusal(function, x, each, "they must have the same type")


def require_fitting(function: Callable[..., Any], x: Tensor, *parameters: Tensor | None) -> None:
    """Raises `UsageError` unless torch accepts the dtypes of a norm's parameters with `x`."""
    if torch.is_autocast_enabled(x.device.type):
        return  # autocast has its own rules
    for each in parameters:
        mixed = x.dtype in NARROW and each is not None and each.dtype == torch.float32
        if each is not None and each.dtype != x.dtype and not mixed:
            rule = "they must have the same type, or float32 with float16 or bfloat16 input"
            raise _refusal(function, x, each, rule)


def result_dtype(
    function: Callable[..., Tensor],
    *operands: tuple[tuple[int, ...], Tensor],
    arguments: tuple[Any, ...] = (),
) -> torch.dtype:
    """Returns the dtype of a call's (first) result, by torch's rules for device and autocast.

    Autocast's rules are torch's alone to know: on CPUs it computes pooling over three dims in
    float32, on CUDA devices in the input's dtype.

    Args:
        function: called once for each combination of dtypes, on operands of zeros; what is created
            for one call of a handler would not be found again.
        operands: a shape for each that the call accepts, and a tensor of its dtype and device.
        arguments: further arguments, hashable.
    """
    device = operands[0][1].device.type
    mixed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    probes = tuple((shape, like.dtype) for shape, like in operands)
    return _result_dtype(function, probes, arguments, device, mixed)


@functools.cache
def _result_dtype(
    function: Callable[..., Tensor],
    probes: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    arguments: tuple[Any, ...],
    device: str,
    mixed: torch.dtype | None,
) -> torch.dtype:
    """Probes a call; `mixed` is part of the key alone, as autocast is on or off around the call."""
    zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in probes]
    found: Any = function(*zeros, *arguments)
    first: Tensor = found[0] if isinstance(found, tuple) else found
    return first.dtype


def _refusal(function: Callable[..., Any], x: Tensor, parameter: Tensor, rule: str) -> UsageError:
    return UsageError(
        f"{function.__name__}: input of {x.dtype} and parameters of {parameter.dtype}; {rule}: "
        "x.to(weight.dtype) or torch.autocast do that"
    )
