"""Computes neighborhood attention by a mask of all tokens by all tokens, for natten's arguments.

natten's own kernels for CPUs know neither float64 nor gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pydist.ops.attention import neighborhood


def keys_of(
    query: int, extent: int, kernel: int, stride: int, dilation: int, is_causal: bool
) -> list[int]:
    """Returns the keys to which a query attends in one dim."""
    sequence = list(range(query % dilation, extent, dilation))
    place = sequence.index(query)
    group = sequence[place - place % stride :][:stride]
    if is_causal:
        last = sequence.index(group[-1])
        return [k for k in sequence[max(0, last - kernel + 1) : last + 1] if k <= query]
    center = sequence.index(group[min(stride // 2, len(group) - 1)])
    start = max(0, center - kernel // 2)
    return sequence[min(start, len(sequence) - kernel) :][:kernel]


def neighborhood_attention_generic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Computes attention to neighbors in tensors [samples, *space, heads, channels]."""
    space = query.shape[1:-2]
    given = [
        (each,) * len(space) if isinstance(each, int) else each
        for each in (kernel_size, stride, dilation, is_causal or False)
    ]
    mask = torch.ones(1, 1, dtype=torch.bool)
    for extent, *window in zip(space, *given, strict=True):
        one = torch.zeros(extent, extent, dtype=torch.bool)
        for place in range(extent):
            one[place, keys_of(place, extent, *window)] = True
        mask = torch.kron(mask, one)
    q, k, v = (t.flatten(1, -3).transpose(1, 2) for t in (query, key, value))
    if additional_keys is not None and additional_values is not None:
        k = torch.cat([k, additional_keys.transpose(1, 2)], 2)
        v = torch.cat([v, additional_values.transpose(1, 2)], 2)
        mask = torch.cat([mask, mask.new_ones(len(mask), additional_keys.shape[1])], 1)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    result = (scores.softmax(-1) @ v).transpose(1, 2).unflatten(1, space)
    sums = scores.logsumexp(-1).transpose(1, 2).unflatten(1, space)
    return (result, sums) if return_lse else result


_module = SimpleNamespace(**{neighborhood.NAME: neighborhood_attention_generic})
neighborhood.check_overrides(_module)
overridable = getattr(_module, neighborhood.NAME)
"""The function with the check for overrides that natten's function has."""
