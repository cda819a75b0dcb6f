"""Gives each rank all elements of some dims, for calls that mix the elements of these dims.

The splits of these dims move to other dims (a transposition, as between the steps of a parallel
FFT), so that ranks divide the work, and move back afterwards. Both moves are redistributions, whose
adjoints make such a call exact to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from pydist.layout import Layout, Split
from pydist.ops.empty import with_elements, without_added
from pydist.partition import subdivide
from pydist.tensor import ShardedTensor, local_of, wrap
from pydist.tensor.operands import redistribute


def whole_along(layout: Layout, dims: Collection[int]) -> Layout:
    """Returns the layout in which each rank has all elements of some dims.

    The axes that split them split the other dims further, the one with the longest blocks first. If
    no dim has enough elements, the ranks along an axis hold copies.
    """
    if not layout.shape:
        return layout  # torch accepts dim 0 of a tensor without dims

    def make() -> Layout:
        mesh, splits = layout.mesh, list(layout.splits)
        freed = [a for d in dims if (s := splits[d]) is not None for a in s.axes]
        for d in dims:
            splits[d] = None
        others = [d for d in range(len(splits)) if d not in dims]
        for axis in freed:
            lengths = {d: layout.shape[d] // _parts(splits[d]) for d in others}
            longest = max(others, key=lambda d: lengths[d], default=None)
            parts = mesh.grid.size((axis,))
            if longest is None or lengths[longest] < parts:
                continue
            split = splits[longest]
            axes = () if split is None else split.axes
            points = [0, layout.shape[longest]] if split is None else split.partition.points
            splits[longest] = Split((*axes, axis), subdivide(points, parts))
        return Layout(mesh, layout.shape, splits)

    return layout.mesh.session.plan(("whole along", layout, tuple(dims)), make)


def _parts(split: Split | None) -> int:
    return 1 if split is None else split.partition.parts


def scaled_layout(layout: Layout, shape: Sequence[int]) -> Layout:
    """Returns a layout of other extents, split in the same proportions; extent 1 is not split."""
    changes = {
        d: None if n == 1 or split is None else split.scaled(n)
        for d, (n, old, split) in enumerate(zip(shape, layout.shape, layout.splits, strict=True))
        if n != old
    }
    return layout.replace(shape, changes)


def along_dims(func: Callable[[Tensor], Any], x: ShardedTensor, dims: Collection[int]) -> Any:
    """Runs a call that mixes the elements of some dims, split or not.

    Args:
        func: maps a tensor to one or several results with as many dims; it treats the other dims
            element by element, and changes no other extents.
        x: the tensor.
        dims: those that the call mixes, 0 or above.

    Returns:
        The result or results, split like `x`; a dim of a new extent in the same proportions.
    """
    moved = redistribute(x, whole_along(x.layout, dims))
    local = local_of(moved)
    if x.numel():  # else all shards are empty
        local = with_elements(local)

    def back(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return type(result)([back(part) for part in result])
        shape = [result.shape[d] if d in dims else n for d, n in enumerate(x.shape)]
        layout = scaled_layout(moved.layout, shape)
        result = wrap(without_added(result, layout.local_shape), layout, x)
        return redistribute(result, scaled_layout(x.layout, shape))

    return back(func(local))
