"""Joins and repeats tensors, along unsplit and split dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout, Split
from pydist.ops.dims import canonical, given_as, numpy_names
from pydist.ops.empty import cat_shards
from pydist.ops.shaping.shape import unsqueeze
from pydist.partition import Partition
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap, wrap_new
from pydist.tensor.operands import prove_equal, redistribute, shard_of_plain


@implements(torch.cat, torch.concat, torch.concatenate)
@numpy_names
def cat(tensors: Sequence[Tensor], dim: int = 0) -> ShardedTensor:
    """Joins tensors in the layout of the one with the most split dims, then the most elements.

    A tensor that is cut in space counts before one that is cut along channels only.

    Along a split dim each rank keeps its share of the extent, and the elements of all tensors move
    to the ranks that own them in the result.
    """
    # torch accepts empty tensors of one dim beside tensors of any shape.
    given = [t for t in tensors if t.dim() != 1 or t.numel() or isinstance(t, ShardedTensor)]
    sharded = [t for t in given if isinstance(t, ShardedTensor)]
    like = max(sharded, key=_importance)
    d = canonical(dim, like.dim())
    for tensor in given:
        _check_fits(tensor, like, d)
    total = sum(t.shape[d] for t in given)
    split = like.layout.splits[d]
    split = None if split is None else split.scaled(total)  # in the same proportions
    starts = itertools.accumulate((t.shape[d] for t in given), initial=0)
    parts = [
        _in_layout(t, _part_of(like, d, start, t.shape[d], split))
        for t, start in zip(given, starts, strict=False)
    ]
    return wrap_new(cat_shards(parts, d), _resized(like.layout, d, total, split), like)


def _importance(tensor: ShardedTensor) -> tuple[int, bool, int]:
    cut = tensor.layout.split_dims
    return len(cut), any(d > 1 for d in cut), tensor.numel()


def _check_fits(tensor: Tensor, like: Tensor, d: int) -> None:
    pairs = zip(like.shape, tensor.shape, strict=False)
    if tensor.dim() != like.dim() or any(n != m for i, (n, m) in enumerate(pairs) if i != d):
        raise RuntimeError(
            f"Sizes of tensors must match except in dimension {d}: got "
            f"{tuple(tensor.shape)} beside {tuple(like.shape)}"
        )


def _resized(layout: Layout, d: int, extent: int, split: Split | None) -> Layout:
    shape = [extent if i == d else n for i, n in enumerate(layout.shape)]
    return layout.replace(shape=shape, changes={d: split})


def _part_of(like: ShardedTensor, d: int, start: int, extent: int, split: Split | None) -> Layout:
    """Returns the layout in which the result needs a tensor that begins at `start`."""
    if split is not None:
        points = [min(extent, max(0, p - start)) for p in split.partition.points]
        split = Split(split.axes, Partition(points))
    return _resized(like.layout, d, extent, split)


def _in_layout(tensor: Tensor, layout: Layout) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        return local_of(redistribute(tensor, layout))
    return shard_of_plain(tensor, layout)


@implements(torch.stack)
@numpy_names
def stack(tensors: Sequence[Tensor], dim: int = 0) -> ShardedTensor:
    """Joins tensors along a new dim."""
    return cat([t.unsqueeze(dim) for t in tensors], dim)


@implements(torch._C._nn.pad_sequence)
def pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> ShardedTensor:
    """Joins sequences along a new dim, padded to the longest."""
    longest = max(len(each) for each in sequences)
    padded = []
    for each in sequences:
        added = longest - len(each)
        rims = (added, 0) if padding_side == "left" else (0, added)
        padded.append(F.pad(each, (*(0, 0) * (each.dim() - 1), *rims), value=padding_value))
    return stack(padded, 0 if batch_first else 1)


def _stacked(name: str, dim: int, lift: Callable[[Sequence[Tensor]], Any]) -> None:
    """Registers torch.{name}, which joins tensors along `dim` after `lift` has added dims."""

    @implements(getattr(torch, name))
    def handler(tensors: Sequence[Tensor]) -> ShardedTensor:
        lifted = lift(tensors)
        lifted = lifted if isinstance(lifted, tuple) else (lifted,)
        return cat(lifted, min(dim, lifted[0].dim() - 1))


def _columns(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t if t.dim() > 1 else t.reshape(-1, 1) for t in tensors)


_stacked("hstack", 1, torch.atleast_1d)
_stacked("vstack", 0, torch.atleast_2d)
_stacked("row_stack", 0, torch.atleast_2d)
_stacked("dstack", 2, torch.atleast_3d)
_stacked("column_stack", 1, _columns)


@implements(torch.Tensor.repeat)
def repeat(input: ShardedTensor, *repeats: Any, **named: Any) -> ShardedTensor:
    """Repeats the tensor along each dim."""
    asked = given_as("repeats", repeats, named)
    times = (asked,) if isinstance(asked, int) else tuple(asked)
    if len(times) < input.dim():
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of "
            "tensor"
        )
    for _ in range(len(times) - input.dim()):
        input = unsqueeze(input, 0)
    old = input.layout
    here = [1 if split else n for n, split in zip(times, old.splits, strict=True)]
    layout = old.replace(shape=[n * k for n, k in zip(old.shape, here, strict=True)])
    result = wrap(local_of(input).repeat(here), layout, input)
    for d, n in enumerate(times):
        if old.splits[d] and n != 1:
            result = cat([result] * n, d) if n else _nothing_of(result, d)
    return result


def _nothing_of(x: ShardedTensor, d: int) -> ShardedTensor:
    return x.narrow(d, 0, 0)  # type: ignore[return-value]


@implements(torch.tile, torch.Tensor.tile)
def tile(input: ShardedTensor, *dims: Any, **named: Any) -> ShardedTensor:
    """Repeats the tensor as `repeat` does; leading dims that are not given are not repeated."""
    asked = given_as("dims", dims, named)
    times = (asked,) if isinstance(asked, int) else tuple(asked)
    return repeat(input, (*[1] * (input.dim() - len(times)), *times))


@implements(torch.repeat_interleave, torch.Tensor.repeat_interleave)
@numpy_names
def repeat_interleave(
    input: ShardedTensor,
    repeats: int | Tensor,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> ShardedTensor:
    """Repeats the elements of a dim one by one; each rank repeats those that it owns."""
    if dim is None:
        return repeat_interleave(input.reshape(-1), repeats, 0)  # type: ignore[arg-type]
    d = canonical(dim, input.dim())
    old, split = input.layout, input.layout.splits[d]
    if isinstance(repeats, ShardedTensor):
        raise refusal(torch.repeat_interleave, (input, repeats), {}, "the counts are sharded")
    if isinstance(repeats, Tensor):
        prove_equal(repeats, old)
    if isinstance(repeats, int) or repeats.numel() == 1:
        count = int(repeats)
        ends = [count * p for p in range(old.shape[d] + 1)]
        mine: int | Tensor = count
    else:
        ends = [0, *itertools.accumulate(repeats.tolist())]
        mine = repeats[old.box.lo[d] : old.box.hi[d]]
    if len(ends) != old.shape[d] + 1:
        raise RuntimeError("repeats must have the same size as input along dim")
    if split is not None:
        split = Split(split.axes, Partition([ends[p] for p in split.partition.points]))
    local = torch.repeat_interleave(local_of(input), mine, d)
    return wrap(local, _resized(old, d, ends[-1], split), input)
