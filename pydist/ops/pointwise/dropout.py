"""Dropout with a mask keyed by position, so that it does not depend on the split."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import UsageError
from pydist.ops.pointwise.keyed import keyed_uniform
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal, replace_shard_, wrap

# Limit of SELU for large negative numbers, the value that alpha dropout sets.
_SELU_LIMIT = -1.7580993408473766


def dropout(
    func: Callable[..., Any],
    per_channel: bool,
    input: ShardedTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> ShardedTensor:
    """Zeroes elements (or channels) with probability p and scales the rest by 1 / (1 - p).

    The random numbers are a function of the seed, the training step, the module, and the element's
    position in the global batch: every split and every rerun draws the same mask.
    """
    if not _drops(func, input, p, training):
        return input
    local = local_of(input)
    mask = _kept(func, input, p, per_channel)
    if p < 1:
        mask.div_(1 - p)
    if inplace:
        return replace_shard_(input, local.mul_(mask))
    return wrap(local * mask, input.layout, input)


def alpha_dropout(
    func: Callable[..., Any],
    per_channel: bool,
    input: ShardedTensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> ShardedTensor:
    """Sets elements (or channels) to SELU's limit, and preserves mean and variance."""
    if not _drops(func, input, p, training):
        return input
    local = local_of(input)
    if p == 1:
        factor, offset = torch.zeros_like(local), torch.zeros_like(local)
    else:
        scale = 1 / math.sqrt((_SELU_LIMIT**2 * p + 1) * (1 - p))
        kept = _kept(func, input, p, per_channel)
        factor = kept * scale
        offset = (1 - kept - p) * (_SELU_LIMIT * scale)
    if inplace:
        return replace_shard_(input, local.mul_(factor).add_(offset))
    return wrap(local * factor + offset, input.layout, input)


def _drops(func: Callable[..., Any], x: ShardedTensor, p: float, training: bool) -> bool:
    if not 0 <= p <= 1:
        raise UsageError(f"dropout probability {p}: 0 to 1 is possible")
    drops = training and p > 0
    if drops and x.dim() == UNBATCHED.get(func):
        raise refusal(func, (x,), {}, "without a batch dim")
    return drops


def _kept(func: Callable[..., Any], x: ShardedTensor, p: float, per_channel: bool) -> Tensor:
    uniform = keyed_uniform(func, x, 2 if per_channel else None)
    return (uniform >= p).to(x.dtype)


UNBATCHED: dict[Callable[..., Any], int] = {F.dropout1d: 2, F.dropout3d: 4}
"""Number of dims of a sample without a batch dim, by function."""


def _register() -> None:
    for func, per_channel in (
        (F.dropout, False),
        (torch.dropout, False),
        (F.dropout1d, True),
        (F.dropout2d, True),
        (F.dropout3d, True),
        (torch.feature_dropout, True),
    ):
        HANDLERS[func] = partial(dropout, func, per_channel)
    for func, per_channel in (
        (F.alpha_dropout, False),
        (torch.alpha_dropout, False),
        (F.feature_alpha_dropout, True),
        (torch.feature_alpha_dropout, True),
    ):
        HANDLERS[func] = partial(alpha_dropout, func, per_channel)


_register()
