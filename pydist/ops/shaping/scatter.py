"""Scatters along unsplit dims, makes one-hot labels, and counts integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.dims import canonical
from pydist.ops.pointwise.elementwise import broadcast_layout
from pydist.ops.pointwise.in_place import in_place_on_plain
from pydist.ops.reduction.extremes import reduce_amax
from pydist.tensor import ShardedTensor, implements, local_of, refusal, replace_shard_, wrap
from pydist.tensor.operands import operand_for, operand_in


def _scatter(
    func: Callable[..., Any], input: Tensor, dim: int, index: Tensor, *src: Any, **kwargs: Any
) -> Any:
    """Runs any scatter call on aligned shards; `dim` must not be split."""
    d = canonical(dim, input.dim())
    tensors = [t for t in (input, index, *src, *kwargs.values()) if isinstance(t, Tensor)]
    like = next(t for t in tensors if isinstance(t, ShardedTensor))
    layout = _scattered_layout(func, input, like, d)

    def aligned(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        for other, (n, m, split) in enumerate(
            zip(value.shape, layout.shape, layout.splits, strict=True)
        ):
            if split is not None and n != m:
                raise refusal(func, (input, index), kwargs, f"dim {other} is split")
        target = Layout(layout.mesh, tuple(value.shape), layout.splits)
        return operand_in(value, target, layout)

    in_place = func.__name__.endswith("_")
    if in_place and not isinstance(input, ShardedTensor):
        args = (input, dim, index, *src)
        return in_place_on_plain(_scatter, func, args, kwargs, layout)
    own = local_of(input) if in_place else aligned(input)  # type: ignore[arg-type]
    options = {name: aligned(value) for name, value in kwargs.items()}
    result = func(own, d, aligned(index), *(aligned(s) for s in src), **options)
    if in_place:
        assert isinstance(input, ShardedTensor)  # a plain one has returned above
        return replace_shard_(input, result)
    return wrap(result, layout, like)


def _scattered_layout(
    func: Callable[..., Any], input: Tensor, like: ShardedTensor, d: int
) -> Layout:
    """Returns the layout of the result: the input's, or that of `like` for a plain input."""
    layout = input._layout if isinstance(input, ShardedTensor) else like._layout
    if layout.splits[d] is not None:
        raise refusal(func, (input, like), {}, f"dim {d} is split")
    splits = [
        split if n == m else None
        for n, m, split in zip(input.shape, layout.shape, layout.splits, strict=True)
    ]
    return Layout(layout.mesh, tuple(input.shape), splits)


def _register(name: str) -> None:
    for variant in (name, name + "_"):
        method = getattr(torch.Tensor, variant)
        functions = [f for f in (method, getattr(torch, variant, None)) if f is not None]

        @implements(*functions)
        def handler(
            input: Tensor, dim: int, index: Tensor, *src: Any, _func: Any = method, **kwargs: Any
        ) -> Any:
            return _scatter(_func, input, dim, index, *src, **kwargs)


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _register(_name)


@implements(F.one_hot)
def one_hot(input: ShardedTensor, num_classes: int = -1) -> ShardedTensor:
    """Converts labels to one-hot vectors along a new last dim."""
    if num_classes < 0:
        num_classes = int(reduce_amax(input)) + 1
    old = input._layout
    layout = Layout(old.mesh, (*old.shape, num_classes), (*old.splits, None))
    return wrap(F.one_hot(local_of(input), num_classes), layout, input)


@implements(torch.bincount, torch.Tensor.bincount)
def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Counts each integer, or sums its weights; the result is plain and equal on all ranks."""
    operands = [input] if weights is None else [input, weights]
    layout = broadcast_layout(operands)
    own, *rest = (operand_for(t, layout, layout.shape).detach() for t in operands)
    group, timers = layout.mesh.group(layout.used_axes), layout.mesh.session.timers
    length = torch.tensor(max(minlength, int(own.max()) + 1 if own.numel() else 0))
    if group.size > 1:
        with timers.measure("statistics"):
            group.all_reduce(length, "max")
    counts = torch.bincount(own, rest[0] if rest else None, int(length))
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
    found = torch.isin(
        local_of(elements), test_elements, assume_unique=assume_unique, invert=invert
    )
    return wrap(found, elements._layout, elements)
