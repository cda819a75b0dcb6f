"""Calls that reorder, add and repeat dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.dims import canonical, canonical_all, given_as, numpy_names
from pydist.ops.pointwise.elementwise import broadcast_layout
from pydist.ops.views import moves
from pydist.tensor import ShardedTensor, implements, local_of, view_of
from pydist.tensor.operands import layout_of_operand, operand_in, redistribute


@implements(torch.unsqueeze, torch.Tensor.unsqueeze)
@numpy_names
def unsqueeze(input: ShardedTensor, dim: int) -> ShardedTensor:
    """Inserts a dim of extent 1."""
    at = canonical(dim, input.dim() + 1)
    old = input.layout
    layout = Layout(
        old.mesh,
        (*old.shape[:at], 1, *old.shape[at:]),
        (*old.splits[:at], None, *old.splits[at:]),
    )
    return view_of(input, local_of(input).unsqueeze(at), layout)


def _at_least(name: str, dims: int) -> None:
    """Registers torch.{name}, which adds dims of extent 1 up to `dims` dims."""

    @implements(getattr(torch, name), getattr(torch._VF, name))
    def handler(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            return _lifted(tensors[0], dims)
        several = tensors[0] if len(tensors) == 1 else tensors
        return tuple(_lifted(t, dims) for t in several)


def _lifted(x: Tensor, dims: int) -> Tensor:
    """Adds dims of extent 1: after the dims of a matrix, before the dim of a vector."""
    while x.dim() < dims:
        x = x.unsqueeze(-1 if x.dim() == 2 else 0)
    return x


for _name, _dims in (("atleast_1d", 1), ("atleast_2d", 2), ("atleast_3d", 3)):
    _at_least(_name, _dims)


@implements(torch.permute, torch.Tensor.permute)
def permute(input: ShardedTensor, *dims: Any, **named: Any) -> ShardedTensor:
    """Reorders the dims with their splits."""
    order = canonical_all(given_as("dims", dims, named), input.dim())
    old = input.layout
    layout = Layout(old.mesh, [old.shape[d] for d in order], [old.splits[d] for d in order])
    return view_of(input, local_of(input).permute(order), layout)


@implements(
    torch.transpose,
    torch.swapaxes,
    torch.swapdims,
    torch.Tensor.transpose,
    torch.Tensor.swapaxes,
    torch.Tensor.swapdims,
)
def transpose(input: ShardedTensor, *dims: int, **named: int) -> ShardedTensor:
    """Swaps two dims, named `dim0` and `dim1`, or `axis0` and `axis1`."""
    first, second = (*dims, *(named[name] for name in sorted(named)))
    order = list(range(input.dim()))
    one, other = canonical(first, input.dim()), canonical(second, input.dim())
    if order:  # torch accepts 0 and -1 as dims of a scalar
        order[one], order[other] = order[other], order[one]
    return permute(input, order)


@implements(torch.Tensor.T.__get__)  # type: ignore[attr-defined]
def reversed_dims(input: ShardedTensor) -> ShardedTensor:
    """Reverses the order of all dims."""
    return permute(input, tuple(reversed(range(input.dim()))))


@implements(torch.t, torch.Tensor.t)
def t(input: ShardedTensor) -> ShardedTensor:
    """Transposes a matrix; tensors of fewer dims do not change."""
    if input.dim() > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {input.dim()}D")
    return reversed_dims(input)


@implements(torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def matrix_transpose(input: ShardedTensor) -> ShardedTensor:
    """Swaps the last two dims."""
    return transpose(input, -2, -1)


@implements(torch.movedim, torch.moveaxis, torch.Tensor.movedim, torch.Tensor.moveaxis)
def movedim(
    input: ShardedTensor, source: int | Sequence[int], destination: int | Sequence[int]
) -> ShardedTensor:
    """Moves dims to other positions; the other dims keep their order."""
    ndim = input.dim()
    start = canonical_all((source,) if isinstance(source, int) else source, ndim)
    end = canonical_all((destination,) if isinstance(destination, int) else destination, ndim)
    if len(start) != len(end):
        raise RuntimeError(
            f"movedim: Invalid source or destination dims: source ({len(start)} dims) should "
            f"contain the same number of dims as destination ({len(end)} dims)"
        )
    taken = dict(zip(end, start, strict=True))
    rest = iter(d for d in range(ndim) if d not in start)
    return permute(input, [taken[d] if d in taken else next(rest) for d in range(ndim)])


@implements(torch.broadcast_to, torch.Tensor.expand, torch.Tensor.broadcast_to)
def expand(input: ShardedTensor, *size: Any, **named: Any) -> ShardedTensor:
    """Repeats dims of extent 1 without copies; repeated dims are unsplit."""
    named.pop("implicit", None)
    asked = given_as("size", size, named)
    asked = (asked,) if isinstance(asked, int) else tuple(asked)
    new = len(asked) - input.dim()
    old = input.layout
    shape = tuple(
        (old.shape[d - new] if d >= new else n) if n == -1 else n for d, n in enumerate(asked)
    )
    if new < 0 or any(m not in (1, n) for m, n in zip(old.shape, shape[new:], strict=True)):
        raise RuntimeError(
            f"expand({list(asked)}): the expanded size of a tensor of shape {old.shape} must "
            "match its existing size at every dim that is not 1"
        )
    repeated = [d for d, n in enumerate(old.shape) if n != shape[new + d]]
    moved = redistribute(input, old.replace(changes=dict.fromkeys(repeated)))
    layout = Layout(old.mesh, shape, (*[None] * new, *moved.layout.splits))
    local = local_of(moved).expand(layout.local_shape)
    is_copy = moves(input, moved.layout)
    return view_of(input, local, layout, is_copy, is_expanded=math.prod(shape) > input.numel())


@implements(torch.Tensor.expand_as)
def expand_as(input: Tensor, other: Tensor) -> Tensor:
    """Repeats dims of extent 1 to the shape of another tensor, with the splits of that tensor."""
    if not isinstance(input, ShardedTensor):
        return input.expand(other.shape)
    layout = broadcast_layout([input, other])
    if layout.shape != tuple(other.shape):
        raise RuntimeError(f"can't expand a tensor of {tuple(input.shape)} to {tuple(other.shape)}")
    return _broadcast(input, layout)


@implements(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Broadcasts tensors to their common shape; plain tensors become plain views."""
    is_list = len(tensors) == 1 and not isinstance(tensors[0], Tensor)
    operands = tensors[0] if is_list else tensors
    layout = broadcast_layout(operands)
    return tuple(
        _broadcast(o, layout) if isinstance(o, ShardedTensor) else o.expand(layout.shape)
        for o in operands
    )


def _broadcast(x: ShardedTensor, layout: Layout) -> ShardedTensor:
    needed = layout_of_operand(x, layout, layout.shape)
    local = operand_in(x, needed, layout).expand(layout.local_shape)
    is_expanded = math.prod(layout.shape) > x.numel()
    return view_of(x, local, layout, moves(x, needed), is_expanded=is_expanded)


@implements(torch.view_as_real)
def view_as_real(input: ShardedTensor) -> ShardedTensor:
    """Shows the real and imaginary parts along a new last dim."""
    old = input.layout
    layout = Layout(old.mesh, (*old.shape, 2), (*old.splits, None))
    local = torch.view_as_real(local_of(input))
    if local.requires_grad and not local.numel():
        # Its backward expects a dense last dim, which torch does not give to empty gradients.
        local.register_hook(partial(torch.clone, memory_format=torch.contiguous_format))
    return view_of(input, local, layout)


@implements(torch.view_as_complex)
def view_as_complex(input: ShardedTensor) -> ShardedTensor:
    """Shows a last dim of two as real and imaginary parts."""
    old = input.layout
    if old.shape[-1:] != (2,):
        raise RuntimeError(f"view_as_complex: the last dim of {list(old.shape)} must have extent 2")
    whole = redistribute(input, old.replace(changes={input.dim() - 1: None}))
    layout = Layout(old.mesh, old.shape[:-1], old.splits[:-1])
    local = torch.view_as_complex(local_of(whole))
    return view_of(input, local, layout, moves(input, whole.layout))
