"""Draws random tensors and random activations, keyed by position as in dropout.

The numbers differ from torch's, whose generators count calls, but are equal for every split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


def _drawn(
    func: Callable[..., Any],
    made: Callable[[Tensor, torch.dtype], Tensor],
    x: ShardedTensor,
    options: Mapping[str, Any],
) -> ShardedTensor:
    """Returns random numbers for a `*_like` call, independent real and imaginary parts if complex.

    Args:
        func: the call.
        made: makes them of uniform numbers, for a dtype.
        x: the tensor of the call.
        options: of the call.
    """
    dtype = options.get("dtype") or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise refusal(func, (x,), options, f"random numbers of {dtype}")
    values = made(keyed_uniform(func, x), dtype)
    if dtype.is_complex:
        values = torch.complex(values, made(keyed_uniform(func, x), dtype))
    return _like(values, x, **options)


@implements(torch.rand_like)
def rand_like(input: ShardedTensor, **options: Any) -> ShardedTensor:
    """Draws uniform numbers in [0, 1), rounded down to the precision of the dtype."""

    def made(uniform: Tensor, dtype: torch.dtype) -> Tensor:
        steps = 2 / torch.finfo(dtype).eps  # in [0, 1); the 2²⁴ of fp32, or more, change nothing
        return uniform.mul_(steps).floor_().div_(steps)

    return _drawn(torch.rand_like, made, input, options)


@implements(torch.randn_like)
def randn_like(input: ShardedTensor, **options: Any) -> ShardedTensor:
    """Draws normal numbers of variance 1: the quantiles of uniform ones."""

    def made(uniform: Tensor, dtype: torch.dtype) -> Tensor:
        normal = torch.special.ndtri(uniform.double() + _HALF_STEP)
        return normal * math.sqrt(0.5) if dtype.is_complex else normal

    return _drawn(torch.randn_like, made, input, options)


@implements(torch.normal)
def normal(mean: Any, std: Any = 1.0, *, generator: Any = None, **options: Any) -> Any:
    """Draws normal numbers of given means and standard deviations, without a gradient.

    Raises:
        RuntimeError: a standard deviation is negative.
    """
    if generator is not None or options:
        raise refusal(torch.normal, (mean, std), {}, "a generator or out=; numbers are keyed")
    positive = torch.as_tensor(local_of(std) if isinstance(std, ShardedTensor) else std).detach()
    torch._assert_async((positive >= 0).all(), "normal expects all elements of std >= 0.0")
    with torch.no_grad():
        return mean + std * torch.randn_like(mean + std)


@implements(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(input: ShardedTensor, p: float | None = None, *, generator: Any = None) -> Any:
    """Draws 1 with the probability given by the element (or `p`), else 0.

    Raises:
        RuntimeError: a probability is not between 0 and 1.
    """
    if generator is not None:
        raise refusal(torch.bernoulli, (input,), {}, "a generator; numbers are keyed by place")
    if input.is_complex() or (p is None and not input.is_floating_point()):
        raise refusal(torch.bernoulli, (input,), {}, f"probabilities of {input.dtype}")
    if p is None:
        chance = local_of(input).detach()
        are_chances = ((chance >= 0) & (chance <= 1)).all()
        torch._assert_async(are_chances, "bernoulli expects probabilities between 0 and 1")
        return _like(keyed_uniform(torch.bernoulli, input) < chance, input)
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli expects a probability between 0 and 1, but got p={p}")
    return _like(keyed_uniform(torch.bernoulli, input) < p, input)


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
