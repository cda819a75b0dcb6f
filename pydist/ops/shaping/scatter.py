"""Handles writes to positions along dims, one-hot labels, and counts of integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout, Split
from pydist.ops.dims import canonical
from pydist.ops.pointwise.elementwise import broadcast_layout, elementwise
from pydist.ops.pointwise.in_place import in_place_on_plain
from pydist.ops.reduction.extremes import reduce_amax
from pydist.ops.transposition import whole_along
from pydist.tensor import (
    ShardedTensor,
    implements,
    local_of,
    refusal,
    replace_shard_,
    source_among,
    wrap,
)
from pydist.tensor.operands import operand_for, operand_in, prove_equal, redistribute


def _scatter(
    func: Callable[..., Any], input: Tensor, dim: int, index: Tensor, *src: Any, **kwargs: Any
) -> Any:
    """Runs a call that writes to positions along a dim, on shards that have all of this dim."""
    d = canonical(dim, input.dim())
    tensors = [t for t in (input, index, *src, *kwargs.values()) if isinstance(t, Tensor)]
    like = source_among(tensors)
    layout = _layout_of_result(input, like, d)
    in_place = func.__name__.endswith("_")
    if in_place and not isinstance(input, ShardedTensor):
        return in_place_on_plain(_scatter, func, (input, dim, index, *src), kwargs, layout)
    is_by_row = func.__name__.startswith("index_")
    written = [t for t in tensors[2 if is_by_row else 1 :] if t.dim() > 0]
    mixed = {d, *(i for t in written for i, n in enumerate(t.shape) if n != layout.shape[i])}
    work = whole_along(layout, sorted(mixed))
    if in_place and work != layout:
        out_of_place = getattr(torch.Tensor, func.__name__[:-1])
        result = _scatter(out_of_place, input, d, index, *src, **kwargs)
        return elementwise(torch.Tensor.copy_, input, result)

    def aligned(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_whole = value.dim() == 0 or (is_by_row and value is index)
        splits = [None] * value.dim() if is_whole else work.splits
        return operand_in(value, Layout(layout.mesh, tuple(value.shape), splits), work)

    own = local_of(input) if in_place else aligned(input)  # type: ignore[arg-type]
    options = {name: aligned(value) for name, value in kwargs.items()}
    result = func(own, d, aligned(index), *(aligned(s) for s in src), **options)
    if in_place:
        assert isinstance(input, ShardedTensor)  # a plain one has returned above
        return replace_shard_(input, result)
    return redistribute(wrap(result, work, like), layout)


def _layout_of_result(input: Tensor, like: ShardedTensor, d: int) -> Layout:
    """Returns the layout of the result: the input's, or that of `like` for a plain input."""
    if isinstance(input, ShardedTensor):
        return input.layout
    shape = tuple(input.shape)
    splits: list[Split | None] = [None] * len(shape)
    if like.dim() == len(shape):
        pairs = zip(shape, like.shape, like.layout.splits, strict=True)
        splits = [split if n == m and i != d else None for i, (n, m, split) in enumerate(pairs)]
    return Layout(like.mesh, shape, splits)


def _register(name: str) -> None:
    for variant in (name, name + "_"):
        method = getattr(torch.Tensor, variant)
        functions = [f for f in (method, getattr(torch, variant, None)) if f is not None]

        @implements(*functions)
        def handler(
            input: Tensor, dim: int, index: Tensor, *src: Any, _func: Any = method, **kwargs: Any
        ) -> Any:
            return _scatter(_func, input, dim, index, *src, **kwargs)


for _name in (
    "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill",
    "index_reduce",
):  # fmt: skip
    _register(_name)


@implements(F.one_hot)
def one_hot(input: ShardedTensor, num_classes: int = -1) -> ShardedTensor:
    """Converts labels to one-hot vectors along a new last dim."""
    if num_classes < 0:
        num_classes = int(reduce_amax(input)) + 1
    old = input.layout
    layout = Layout(old.mesh, (*old.shape, num_classes), (*old.splits, None))
    return wrap(F.one_hot(local_of(input), num_classes), layout, input)


@implements(torch.bincount, torch.Tensor.bincount)
def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Counts each integer, or sums its weights; the result is plain and equal on all ranks."""
    if weights is not None and weights.shape != input.shape:
        raise RuntimeError("bincount: weights should be 1-d and have the same length as input")
    operands = [input] if weights is None else [input, weights]
    layout = broadcast_layout(operands)
    own, *rest = (operand_for(t, layout, layout.shape).detach() for t in operands)
    group, timers = layout.mesh.group(layout.used_axes), layout.mesh.session.timers
    length = torch.tensor(max(minlength, int(own.max()) + 1 if own.numel() else 0))
    if group.size > 1:
        with timers.measure("statistics"):
            group.all_reduce(length, "max")
    counts = torch.bincount(own, rest[0] if rest else None, int(length))
    if weights is not None:  # of nothing, torch's sums are integers
        counts = counts.to(weights.dtype if weights.dtype == torch.float32 else torch.float64)
    if group.size > 1:
        with timers.measure("statistics"):
            group.all_reduce(counts)
    return counts


@implements(torch.isin)
def isin(
    elements: Tensor, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> ShardedTensor:
    """Returns a mask of elements that are among given ones, which are plain."""
    if not isinstance(elements, ShardedTensor) or isinstance(test_elements, ShardedTensor):
        raise refusal(torch.isin, (elements, test_elements), {}, "the elements to find are sharded")
    layout, local = elements.layout, local_of(elements)
    if isinstance(test_elements, Tensor):
        prove_equal(test_elements, layout.whole())
    found = torch.isin(local, test_elements, assume_unique=assume_unique, invert=invert)
    return wrap(found, layout, elements)
