"""Draws random tensors and random activations, keyed by position as in dropout.

The numbers differ from torch's, whose generators count calls, but are equal for every split.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.ops.pointwise.elementwise import elementwise
from pydist.ops.pointwise.keyed import keyed_uniform
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap

_HALF_STEP = 2.0**-25
"""Of the uniform numbers, multiples of 2⁻²⁴: the middles of their intervals are in (0, 1)."""


def _like(values: Tensor, x: ShardedTensor, **options: Any) -> ShardedTensor:
    """Converts values to the dtype and other options of a `*_like` call, by default as in x."""
    like = torch.empty_like(local_of(x), **options)
    local = like.detach().copy_(values).requires_grad_(like.requires_grad)
    return wrap(local, x.layout, x)


@implements(torch.rand_like)
def rand_like(input: ShardedTensor, **options: Any) -> ShardedTensor:
    """Draws uniform numbers in [0, 1), rounded down to the precision of the dtype."""
    dtype = options.get("dtype") or input.dtype
    steps = 2 / torch.finfo(dtype).eps  # in [0, 1); at least the 2²⁴ of fp32 numbers change nothing
    values = keyed_uniform(torch.rand_like, input)
    return _like(values.mul_(steps).floor_().div_(steps), input, **options)


@implements(torch.randn_like)
def randn_like(input: ShardedTensor, **options: Any) -> ShardedTensor:
    """Draws normal numbers: the quantiles of uniform ones."""
    uniform = keyed_uniform(torch.randn_like, input).double()
    return _like(torch.special.ndtri(uniform + _HALF_STEP), input, **options)


@implements(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(input: ShardedTensor, p: float | None = None, *, generator: Any = None) -> Any:
    """Draws 1 with the probability given by the element (or `p`), else 0."""
    if generator is not None:
        raise refusal(torch.bernoulli, (input,), {}, "a generator; numbers are keyed by place")
    chance = local_of(input).detach() if p is None else p
    return _like(keyed_uniform(torch.bernoulli, input) < chance, input)


@implements(F.rrelu, torch.rrelu)
def rrelu(
    input: ShardedTensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """Applies leaky ReLU, in training with a slope drawn for each element."""
    if not training:
        return elementwise(F.leaky_relu, input, (lower + upper) / 2, inplace=inplace)
    if inplace:
        raise refusal(F.rrelu, (input,), {}, "in place in training")
    slopes = lower + (upper - lower) * _like(keyed_uniform(F.rrelu, input), input)
    return torch.where(input > 0, input, input * slopes)
