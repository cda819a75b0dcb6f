"""Sums of products over labeled dims; if a summed dim is split, the ranks add partial sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.exchange.adjoints import all_reduce_sum, sum_parts
from pydist.grid import CHANNEL_AXIS
from pydist.layout import Layout, Split
from pydist.tensor import ShardedTensor, refusal, source_among, wrap
from pydist.tensor.operands import operand_in

Labels = Sequence[str]
"""Names of a tensor's dims; dims with the same name have the same extent, or extent 1."""

ATTENTION = "attention over split tokens is not supported: gather with full_tensor()"


def contract(
    func: Callable[..., Any],
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    out: Labels,
    local: Callable[..., Tensor],
    preset: Mapping[str, Split] | None = None,
) -> Any:
    """Computes the product of all operands, summed over the labels that are not in `out`.

    A label is split as in the operand with the most split dims, then the most elements; the others
    are redistributed to match. Ranks that split a summed label add their partial sums.

    Args:
        func: torch's call, for errors.
        operands: sharded and plain tensors, at least one of them sharded.
        labels: of each operand.
        out: labels of the result.
        local: computes the result from shards of the operands.
        preset: splits of labels, over axes that cut no operand.

    Raises:
        NotSupported: two labels of the result are split over the same ranks.
    """
    extents = _extents(func, operands, labels)
    splits = _splits(func, operands, labels, out, extents) | dict(preset or {})
    like = source_among(operands)
    mesh = like.mesh
    product = Layout(mesh, list(extents.values()), [splits.get(label) for label in extents])
    parts = []
    for operand, names in zip(operands, labels, strict=True):
        shape = tuple(operand.shape)
        pairs = zip(names, shape, strict=True)
        cut = [splits.get(i) if n == extents[i] else None for i, n in pairs]
        parts.append(operand_in(operand, Layout(mesh, shape, cut), product))
    result = local(*parts)
    axes = tuple(a for i, s in splits.items() if i not in out for a in s.axes)
    if axes:
        # Partial sums in half precision are rounded once, like a single sum.
        exact = result.float() if result.dtype in (torch.bfloat16, torch.float16) else result
        # A scalar is plain: its gradient may differ between the ranks.
        total = sum_parts(exact, mesh, axes) if out else all_reduce_sum(exact, mesh, axes)
        result = total.to(result.dtype)
    if not out:
        return result  # a scalar is plain, as a loss must be
    layout = Layout(mesh, [extents[i] for i in out], [splits.get(i) for i in out])
    return wrap(result, layout, like)


def _extents(
    func: Callable[..., Any], operands: Sequence[Tensor], labels: Sequence[Labels]
) -> dict[str, int]:
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


def _splits(
    func: Callable[..., Any],
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    out: Labels,
    extents: dict[str, int],
) -> dict[str, Split]:
    """Chooses the split of each label; each mesh axis splits at most one label."""
    pairs = zip(operands, labels, strict=True)
    sharded = [(o, names) for o, names in pairs if isinstance(o, ShardedTensor)]
    sharded.sort(key=lambda pair: (-len(pair[0]._layout.split_dims), -pair[0].numel()))
    chosen: dict[str, Split] = {}
    taken: dict[str, tuple[str, Labels]] = {}
    for operand, names in sharded:
        for label, split in zip(names, operand._layout.splits, strict=True):
            extent = extents[label]
            if split is None or label in chosen or extent != split.partition.extent:
                continue
            if extent == 1 or any(names.count(label) > 1 for names in labels):
                continue  # one element, or a diagonal: gathered
            clash = [taken[a] for a in split.axes if a in taken]
            if not clash:
                chosen[label] = split
                taken |= dict.fromkeys(split.axes, (label, names))
            elif split.axes == (CHANNEL_AXIS,):
                continue  # channels beside channels: gathered
            elif label in out and any(
                other in out and other not in names and label not in theirs
                for other, theirs in clash
            ):
                # Dims of two tensors that meet only in the result, such as queries and keys.
                raise refusal(func, tuple(operands), {}, ATTENTION)
    return chosen
