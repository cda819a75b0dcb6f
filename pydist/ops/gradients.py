"""Handles calls on lists of gradients and weights, both plain and sharded ones.

`GradScaler` makes one, clipping and `zero_grad` make others with `foreach=True`; by default torch
makes those for plain tensors only. Averages of weights (`torch.optim.swa_utils`) make the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.tensor import ShardedTensor, implements, local_of, refusal


@implements(torch._amp_foreach_non_finite_check_and_unscale_)
def unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscales gradients for `GradScaler`; an infinite value on any rank counts on all ranks."""
    sharded = [grad for grad in grads if isinstance(grad, ShardedTensor)]
    own = [local_of(grad) if isinstance(grad, ShardedTensor) else grad for grad in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inv_scale)
    layouts = [grad.layout for grad in sharded]
    for axes in dict.fromkeys(layout.used_axes for layout in layouts):
        layouts[0].mesh.group(axes).all_reduce(found_inf, "max")


@implements(torch._foreach_zero_)
def zero_all(grads: Sequence[Tensor]) -> None:
    """Sets gradients to zero, one after the other."""
    for grad in grads:
        grad.zero_()


@implements(torch._foreach_mul_)
def scale_all(grads: Sequence[Tensor], other: Any) -> None:
    """Multiplies gradients by a number, one after the other."""
    if isinstance(other, Sequence):
        raise refusal(torch._foreach_mul_, (grads,), {}, "a factor for each")
    for grad in grads:
        grad.mul_(other)


@implements(torch._foreach_norm)
def norm_all(grads: Sequence[Tensor], ord: float = 2.0) -> list[Tensor]:
    """Computes the norm of each gradient."""
    return [torch.linalg.vector_norm(grad, ord) for grad in grads]


@implements(torch._foreach_clamp_min_)
def clamp_min_all(grads: Sequence[Tensor], bound: float) -> None:
    """Raises values of gradients to a bound."""
    for grad in grads:
        grad.clamp_(min=bound)


@implements(torch._foreach_clamp_max_)
def clamp_max_all(grads: Sequence[Tensor], bound: float) -> None:
    """Lowers values of gradients to a bound."""
    for grad in grads:
        grad.clamp_(max=bound)


@implements(torch._foreach_lerp_)
def lerp_all(weights: Sequence[Tensor], others: Sequence[Tensor], weight: Any) -> None:
    """Moves averaged weights towards others."""
    if isinstance(weight, Sequence):
        raise refusal(torch._foreach_lerp_, (weights, others), {}, "one factor for all")
    for average, other in zip(weights, others, strict=True):
        average.lerp_(other, weight)
