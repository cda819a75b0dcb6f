"""Calls that change the shape, and linear layers behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout, Split
from pydist.mesh import SPATIAL_AXES
from pydist.ops.dims import canonical, canonical_all
from pydist.ops.redistribute import parameter_for, redistribute, shard_of_plain
from pydist.partition import Partition
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap


def gathered_layout(layout: Layout) -> Layout:
    """Where a sample goes that has to be whole: one sample a rank where there are enough.

    With at least as many samples as ranks in the group each rank takes its share of the batch
    (data parallel), so that no work is done twice; with fewer every rank holds all of them.
    """
    mesh = layout.mesh
    splits: list[Split | None] = [None] * len(layout.shape)
    if 1 < mesh.sample_size <= layout.shape[0]:
        axes = tuple(a for a in SPATIAL_AXES if mesh.axis_size(a) > 1)
        splits[0] = Split(axes, Partition.even(layout.shape[0], mesh.sample_size))
    return Layout(mesh, layout.shape, splits)


def _reshape(x: ShardedTensor, shape: Sequence[int]) -> ShardedTensor:
    """Reshapes; dims that are merged or divided are gathered first if they are split."""
    out = _resolve(shape, x.shape)
    kept = _kept_dims(tuple(x.shape), out)
    if any(x._layout.splits[d] for d in range(x.dim()) if d not in kept):
        x = redistribute(x, gathered_layout(x._layout))
        if any(x._layout.splits[d] for d in range(x.dim()) if d not in kept):
            x = redistribute(x, x._layout.whole())
    splits: list[Split | None] = [None] * len(out)
    for source, target in kept.items():
        splits[target] = x._layout.splits[source]
    layout = Layout(x.mesh, out, splits)
    return wrap(local_of(x).reshape(layout.local_shape), layout, x)


def _resolve(shape: Sequence[int], old: Sequence[int]) -> tuple[int, ...]:
    known = math.prod(n for n in shape if n != -1)
    free = math.prod(old) // max(1, known)
    out = tuple(free if n == -1 else int(n) for n in shape)
    if math.prod(out) != math.prod(old):
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of shape {tuple(old)}")
    return out


def _kept_dims(old: tuple[int, ...], new: tuple[int, ...]) -> dict[int, int]:
    """The dims that pass through a reshape: equal extent, equal number of elements before."""
    kept = {}
    starts = {math.prod(new[:j]): j for j in reversed(range(len(new))) if new[j] != 1}
    for i, extent in enumerate(old):
        j = starts.get(math.prod(old[:i]))
        if extent != 1 and j is not None and new[j] == extent:
            kept[i] = j
    return kept


@implements(torch.reshape, torch.Tensor.reshape, torch.Tensor.view)
def reshape(input: ShardedTensor, *shape: Any, **kw: Any) -> ShardedTensor:
    """Reshape and view; the result may be a copy."""
    asked: Any = kw.get("shape", kw.get("size", shape[0] if len(shape) == 1 else shape))
    if isinstance(asked, torch.dtype):
        raise refusal(torch.Tensor.view, (input,), {}, "a view of another dtype")
    return _reshape(input, (asked,) if isinstance(asked, int) else asked)


@implements(torch.flatten, torch.Tensor.flatten)
def flatten(input: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> ShardedTensor:
    """Merges the dims from `start_dim` to `end_dim`."""
    start, end = canonical(start_dim, input.dim()), canonical(end_dim, input.dim())
    merged = math.prod(input.shape[start : end + 1])
    return _reshape(input, (*input.shape[:start], merged, *input.shape[end + 1 :]))


@implements(torch.unsqueeze, torch.Tensor.unsqueeze)
def unsqueeze(input: ShardedTensor, dim: int) -> ShardedTensor:
    """Inserts a dim of extent 1."""
    at = canonical(dim, input.dim() + 1)
    splits = list(input._layout.splits)
    splits.insert(at, None)
    shape = list(input.shape)
    shape.insert(at, 1)
    layout = Layout(input.mesh, shape, splits)
    return wrap(local_of(input).unsqueeze(at), layout, input)


@implements(torch.squeeze, torch.Tensor.squeeze)
def squeeze(input: ShardedTensor, dim: int | Sequence[int] | None = None) -> ShardedTensor:
    """Removes dims of (global) extent 1."""
    asked = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d for d in canonical_all(asked, input.dim()) if input.shape[d] == 1}
    shape = [n for d, n in enumerate(input.shape) if d not in gone]
    return _reshape(input, shape)


@implements(torch.permute, torch.Tensor.permute)
def permute(input: ShardedTensor, *dims: Any, **kw: Any) -> ShardedTensor:
    """Reorders the dims; the splits go with them."""
    order = kw.get("dims", dims[0] if len(dims) == 1 else dims)
    order = canonical_all(order, input.dim())
    old = input._layout
    layout = Layout(old.mesh, [old.shape[d] for d in order], [old.splits[d] for d in order])
    return wrap(local_of(input).permute(order), layout, input)


@implements(torch.transpose, torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes)
def transpose(input: ShardedTensor, dim0: int, dim1: int) -> ShardedTensor:
    """Exchanges two dims."""
    order = list(range(input.dim()))
    one, other = canonical(dim0, input.dim()), canonical(dim1, input.dim())
    order[one], order[other] = order[other], order[one]
    return permute(input, order)


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> ShardedTensor:
    """Joins tensors along a dim that is whole; the others follow the first sharded one."""
    like = next(t for t in tensors if isinstance(t, ShardedTensor))
    d = canonical(dim, like.dim())
    if like._layout.splits[d] is not None:
        raise refusal(torch.cat, tuple(tensors), {}, f"dim {d} is split")
    parts = []
    for tensor in tensors:
        pairs = zip(like.shape, tensor.shape, strict=False)
        others = [(n, m) for i, (n, m) in enumerate(pairs) if i != d]
        if tensor.dim() != like.dim() or any(n != m for n, m in others):
            raise RuntimeError(
                f"Sizes of tensors must match except in dimension {d}: got "
                f"{tuple(tensor.shape)} beside {tuple(like.shape)}"
            )
        layout = like._layout.replace(
            shape=[tensor.shape[i] if i == d else n for i, n in enumerate(like.shape)]
        )
        parts.append(_in_layout(tensor, layout))
    total = sum(t.shape[d] for t in tensors)
    layout = like._layout.replace(shape=[total if i == d else n for i, n in enumerate(like.shape)])
    return wrap(torch.cat(parts, d), layout, like)


def _in_layout(tensor: Tensor, layout: Layout) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        return local_of(redistribute(tensor, layout))
    return shard_of_plain(tensor, layout)


@implements(torch.stack)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> ShardedTensor:
    """Joins tensors along a new dim."""
    return cat([t.unsqueeze(dim) for t in tensors], dim)


@implements(torch.Tensor.__getitem__)
def getitem(x: ShardedTensor, index: Any) -> ShardedTensor:
    """Integers and slices along whole dims, `None`; split dims only as a whole (`:`)."""
    given = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None for part in given)
    if any(part is Ellipsis for part in given):
        at = next(i for i, part in enumerate(given) if part is Ellipsis)
        given[at : at + 1] = [slice(None)] * (x.dim() - used + 1)
    else:
        given += [slice(None)] * (x.dim() - used)
    shape: list[int] = []
    splits: list[Split | None] = []
    dim = 0
    for part in given:
        if part is None:
            shape.append(1)
            splits.append(None)
            continue
        if not isinstance(part, (int, slice)):
            raise refusal(torch.Tensor.__getitem__, (x,), {}, f"an index {type(part).__name__}")
        split = x._layout.splits[dim]
        if split is not None and part != slice(None):
            raise refusal(torch.Tensor.__getitem__, (x,), {}, f"dim {dim} is split")
        if isinstance(part, slice):
            shape.append(len(range(*part.indices(x.shape[dim]))))
            splits.append(split)
        dim += 1
    return wrap(local_of(x)[tuple(given)], Layout(x.mesh, shape, splits), x)


@implements(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> ShardedTensor:
    """A linear layer over the last dim, with replicated weights."""
    if not isinstance(input, ShardedTensor):
        raise refusal(F.linear, (input, weight), {}, "the input is plain and the weight sharded")
    if input._layout.splits[-1] is not None:
        input = redistribute(input, gathered_layout(input._layout))
    old = input._layout
    layout = old.replace(shape=(*old.shape[:-1], weight.shape[0]))
    local = F.linear(local_of(input), parameter_for(weight, old), parameter_for(bias, old))
    return wrap(local, layout, input)


def _softmax(func: Any, input: ShardedTensor, dim: int | None = None, **kw: Any) -> ShardedTensor:
    if dim is None:
        raise refusal(func, (input,), {}, "give the dim")
    if input._layout.splits[canonical(dim, input.dim())] is not None:
        raise refusal(func, (input,), {}, f"dim {dim} is split")
    return wrap(func(local_of(input), dim, dtype=kw.get("dtype")), input._layout, input)


@implements(F.softmax, torch.softmax, torch.Tensor.softmax)
def softmax(input: ShardedTensor, dim: int | None = None, *_: Any, **kw: Any) -> ShardedTensor:
    """Softmax over a dim that is whole."""
    return _softmax(torch.softmax, input, dim, **kw)


@implements(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax)
def log_softmax(input: ShardedTensor, dim: int | None = None, *_: Any, **kw: Any) -> ShardedTensor:
    """Logarithm of the softmax over a dim that is whole."""
    return _softmax(torch.log_softmax, input, dim, **kw)
