"""Sums of products over labeled dims; if a summed dim is split, the ranks add partial sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydist.exchange.adjoints import all_reduce_sum, sum_parts
from pydist.grid import CHANNEL_AXIS
from pydist.layout import Layout, Split
from pydist.mesh import Mesh
from pydist.ops.dtypes import NARROW
from pydist.tensor import ShardedTensor, plain_result, source_among, wrap
from pydist.tensor.operands import operand_in

Labels = Sequence[str]
"""Names of a tensor's dims; dims with the same name have the same extent, or extent 1."""

_MOST_ORDERS = 3
"""Sharded operands of a product whose orders are all compared; of more only the usual one."""


def contract(
    func: Callable[..., Any],
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    out: Labels,
    local: Callable[..., Tensor],
    preset: Mapping[str, Split] | None = None,
    whole: Collection[str] = (),
) -> Any:
    """Computes the product of all operands, summed over the labels that are not in `out`.

    Operands are redistributed to the labels' splits (`splits_of`). Ranks that split a summed label
    add their partial sums.

    Args:
        func: torch's call, for errors.
        operands: sharded and plain tensors, at least one of them sharded.
        labels: of each operand.
        out: labels of the result.
        local: computes the result from shards of the operands.
        preset: splits of labels, over axes that cut no operand.
        whole: labels that are not split: each rank gathers their dims.
    """
    like = source_among(operands)
    mesh = like.mesh

    def make() -> _Product:
        extents = extents_of(func, operands, labels)
        splits = splits_of(operands, labels, out, extents, whole) | dict(preset or {})
        product = Layout(mesh, list(extents.values()), [splits.get(label) for label in extents])
        return _Product(
            product,
            layouts_of(operands, labels, splits, extents, mesh),
            tuple(a for i, s in splits.items() if i not in out for a in s.axes),
            Layout(mesh, [extents[i] for i in out], [splits.get(i) for i in out]),
        )

    given = tuple(x.layout if isinstance(x, ShardedTensor) else tuple(x.shape) for x in operands)
    names = tuple(map(tuple, labels)), tuple(out), tuple(whole)
    key = ("product", given, names, tuple((preset or {}).items()))
    product, inputs, axes, layout = mesh.session.plan(key, make)
    parts = [operand_in(x, each, product) for x, each in zip(operands, inputs, strict=True)]
    result = local(*parts)
    if axes:
        # Partial sums in half precision are rounded once, like a single sum.
        exact = result.float() if result.dtype in NARROW else result
        # The gradient of a plain result may differ between the ranks.
        total = sum_parts(exact, mesh, axes) if out else all_reduce_sum(exact, mesh, axes)
        result = total.to(result.dtype)
    # A scalar is plain, as a loss must be.
    return wrap(result, layout, like) if out else plain_result(result, like)


def require_fit(func: Callable[..., Any], *operands: Tensor | None) -> None:
    """Raises what torch raises for the global shapes; blocks of extent 1 would broadcast."""
    shapes = tuple(None if x is None else tuple(x.shape) for x in operands)

    def make() -> None:
        func(*(None if shape is None else torch.empty(shape, device="meta") for shape in shapes))

    source_among(operands).mesh.session.plan(("fit", func, shapes), make)


class _Product(NamedTuple):
    """Plan that says how a product runs: the layouts of its operands and of its result.

    Attributes:
        product: a layout with all labels as dims, which uses all axes.
        inputs: the layout in which each operand is needed.
        axes: along which the ranks add partial sums.
        out: of the result.
    """

    product: Layout
    inputs: list[Layout]
    axes: tuple[str, ...]
    out: Layout


def aligned(
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    splits: Mapping[str, Split],
    extents: Mapping[str, int],
    product: Layout,
) -> list[Tensor]:
    """Returns the part of each operand that this rank needs for its part of a product.

    Args:
        operands: sharded and plain tensors.
        labels: of each operand.
        splits: of the labels.
        extents: of the labels; a dim of extent 1 is broadcast.
        product: a layout that uses all axes of the product.
    """
    inputs = layouts_of(operands, labels, splits, extents, product.mesh)
    return [operand_in(x, each, product) for x, each in zip(operands, inputs, strict=True)]


def layouts_of(
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    splits: Mapping[str, Split],
    extents: Mapping[str, int],
    mesh: Mesh,
) -> list[Layout]:
    """Returns the layout in which a product needs each operand; see `aligned`."""
    found = []
    for operand, names in zip(operands, labels, strict=True):
        shape = tuple(operand.shape)
        pairs = zip(names, shape, strict=True)
        cut = [splits.get(i) if n == extents[i] else None for i, n in pairs]
        found.append(Layout(mesh, shape, cut))
    return found


def extents_of(
    func: Callable[..., Any], operands: Sequence[Tensor], labels: Sequence[Labels]
) -> dict[str, int]:
    """Returns the extent of each label.

    Raises:
        RuntimeError: dims with the same label have different extents.
    """
    extents: dict[str, int] = {}
    for operand, names in zip(operands, labels, strict=True):
        for label, n in zip(names, operand.shape, strict=True):
            known = extents.setdefault(label, n)
            if known == 1:
                extents[label] = n
            elif n not in (1, known):
                shapes = " and ".join(str(tuple(o.shape)) for o in operands)
                raise RuntimeError(f"{func.__name__}: the shapes {shapes} do not fit together")
    return extents


def splits_of(
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    out: Labels,
    extents: Mapping[str, int],
    whole: Collection[str] = (),
) -> dict[str, Split]:
    """Chooses the split of each label; each mesh axis splits at most one label.

    A label is split as in the operand with the most split dims, then the most elements. Where dims
    of two operands are split over the same axes, as the tokens of queries and of keys, one of them
    is gathered: the choice moves the fewest elements.

    Args:
        operands: sharded and plain tensors.
        labels: of each operand.
        out: labels of the result.
        extents: of the labels.
        whole: labels that are not split.
    """
    pairs = zip(operands, labels, strict=True)
    sharded = [(o, names) for o, names in pairs if isinstance(o, ShardedTensor)]
    sharded.sort(key=lambda pair: (-len(pair[0].layout.split_dims), -pair[0].numel()))
    diagonal = {i for names in labels for i in names if names.count(i) > 1}
    kept_whole = {*whole, *diagonal, *(i for i, n in extents.items() if n == 1)}
    usual, is_contested = _splits_in_order(sharded, extents, kept_whole)
    if not is_contested or len(sharded) > _MOST_ORDERS:
        return usual
    options = [_splits_in_order(o, extents, kept_whole)[0] for o in permutations(sharded)]
    return min(options, key=lambda splits: _moved(sharded, out, extents, splits))


_Sharded = Sequence[tuple[ShardedTensor, Labels]]


def _splits_in_order(
    sharded: _Sharded, extents: Mapping[str, int], whole: Collection[str]
) -> tuple[dict[str, Split], bool]:
    """Returns splits that keep those of the first operands, and whether an axis had a choice."""
    chosen: dict[str, Split] = {}
    taken: set[str] = set()
    is_contested = False
    for operand, names in sharded:
        for label, split in zip(names, operand.layout.splits, strict=True):
            if split is None or label in chosen or extents[label] != split.partition.extent:
                continue
            if label in whole:
                continue
            if taken.isdisjoint(split.axes):
                chosen[label] = split
                taken.update(split.axes)
            else:
                # Channels beside channels are gathered, as the layers expect.
                is_contested |= split.axes != (CHANNEL_AXIS,)
    return chosen, is_contested


def _moved(
    sharded: _Sharded, out: Labels, extents: Mapping[str, int], splits: Mapping[str, Split]
) -> int:
    """Returns about how many elements a rank receives in forward: operands, and sums."""
    moved = 0
    for operand, names in sharded:
        kept = all(
            split is None or splits.get(label) == split
            for label, split in zip(names, operand.layout.splits, strict=True)
        )
        moved += 0 if kept else operand.numel()
    if any(label not in out for label in splits):
        moved += 2 * math.prod(extents[label] for label in out)
    return moved
