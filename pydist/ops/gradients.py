"""Handles calls on lists of gradients and weights, both plain and sharded ones.

`GradScaler` makes one, clipping and `zero_grad` make others with `foreach=True`; by default torch
makes those for plain tensors only. Averages of weights make the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.tensor import HANDLERS, ShardedTensor, implements, local_of


@implements(torch._amp_foreach_non_finite_check_and_unscale_)
def unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscales gradients for `GradScaler`; an infinite value on any rank counts on all ranks."""
    sharded = [grad for grad in grads if isinstance(grad, ShardedTensor)]
    own = [local_of(grad) if isinstance(grad, ShardedTensor) else grad for grad in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inv_scale)
    layouts = [grad.layout for grad in sharded]
    for axes in dict.fromkeys(layout.used_axes for layout in layouts):
        layouts[0].mesh.group(axes).all_reduce(found_inf, "max")


@implements(torch._foreach_norm)
def norm_all(grads: Sequence[Tensor], ord: float = 2.0) -> list[Tensor]:
    """Computes the norm of each gradient."""
    return [torch.linalg.vector_norm(grad, ord) for grad in grads]


_OPERANDS = {"scalar": "other", "scalars": "other", "tensors1": "end"}
"""Names of operands in functions of lists, and in those of a tensor."""


def _one_by_one(
    change: Callable[..., Tensor], tensors: Sequence[Tensor], *given: Any, **options: Any
) -> None:
    """Changes tensors one after the other, each with one of listed operands or with all others.

    Raises:
        RuntimeError: a list of operands has another length, as of torch.
    """
    options = {_OPERANDS.get(name, name): x for name, x in options.items()}
    for x in (*given, *options.values()):
        if isinstance(x, Sequence) and len(x) != len(tensors):
            raise RuntimeError(f"lists of {len(tensors)} and {len(x)} tensors or numbers")

    def of(i: int, x: Any) -> Any:
        return x[i] if isinstance(x, Sequence) else x

    for i, tensor in enumerate(tensors):
        named = {name: of(i, x) for name, x in options.items()}
        change(tensor, *(of(i, x) for x in given), **named)


_CHANGES: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch._foreach_zero_: Tensor.zero_,
    torch._foreach_copy_: Tensor.copy_,
    torch._foreach_add_: Tensor.add_,
    torch._foreach_sub_: Tensor.sub_,
    torch._foreach_mul_: Tensor.mul_,
    torch._foreach_div_: Tensor.div_,
    torch._foreach_lerp_: Tensor.lerp_,
    torch._foreach_clamp_min_: Tensor.clamp_min_,
    torch._foreach_clamp_max_: Tensor.clamp_max_,
}
for _call, _change in _CHANGES.items():
    HANDLERS[_call] = partial(_one_by_one, _change)
