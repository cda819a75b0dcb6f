"""Finds the global indices of nonzero elements, plain and equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydist.ops.pointwise.elementwise import elementwise
from pydist.tensor import ShardedTensor, implements, local_of


def _indices(x: ShardedTensor) -> Tensor:
    """Returns the indices of nonzero elements, [number, dims], in global row-major order."""
    own = local_of(x).detach().nonzero()
    group, shape = x.mesh.group(x.layout.used_axes), x.layout.shape
    if group.size == 1:
        return own
    own = (own + torch.tensor(x.layout.box.lo, device=x.device)).contiguous()
    with x.mesh.session.timers.measure("redistribute"):
        counts = group.all_gather(torch.tensor([own.shape[0]])).flatten().tolist()
        found = own.new_empty(sum(counts), x.dim())
        group.all_gather_async(own, found, [count * x.dim() for count in counts]).wait()
    place = torch.zeros(found.shape[0], dtype=torch.int64, device=found.device)
    for d, extent in enumerate(shape):
        place = place * extent + found[:, d]
    return found[place.argsort()].t().contiguous().t()  # column-major in memory, as in torch


@implements(torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere)
def nonzero(input: ShardedTensor, *, as_tuple: bool = False) -> Any:
    """Returns the indices of the nonzero elements of the full tensor on each rank."""
    if as_tuple and input.dim() == 0:
        input = input.unsqueeze(0)  # type: ignore[assignment]  # a sharded one
    indices = _indices(input)
    return indices.unbind(1) if as_tuple else indices


@implements(torch.where)
def where(condition: Tensor, *choices: Any, **named: Any) -> Any:
    """Selects elements of two tensors; with only the condition, returns the indices of its ones."""
    if not choices and not named:
        return nonzero(condition, as_tuple=True)  # type: ignore[arg-type]  # the only tensor
    return elementwise(torch.where, condition, *choices, **named)
