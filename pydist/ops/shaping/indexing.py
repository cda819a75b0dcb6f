"""Indexes tensors with brackets, and with tensors of indices, split or not."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout, Split
from pydist.ops.dims import canonical, numpy_names
from pydist.ops.empty import with_elements, without_added
from pydist.ops.pointwise.elementwise import broadcast_layout
from pydist.ops.shaping.slicing import full_index, sliced
from pydist.tensor import ShardedTensor, implements, local_of, refusal, source_among, wrap
from pydist.tensor.operands import (
    layout_of_operand,
    operand_in,
    parameter_for,
    prove_equal,
    whole_operand,
)

_GET = torch.Tensor.__getitem__


@implements(_GET)
def getitem(x: Tensor, index: Any) -> Tensor:
    """Indexes with integers, slices, `None`, tensors of indices, and masks.

    Tensors of indices along a split dim gather that dim first. The number of elements that a
    sharded mask selects is not known before: the result is plain, and equal on all ranks.
    """
    entries = entries_of(x, index)
    if any(isinstance(e, ShardedTensor) and is_mask(e) for e in entries):
        whole = partial(whole_operand, like=source_among((x, *entries)))
        taken: Tensor = whole(x)[tuple(map(whole, entries))]
        return taken
    if isinstance(x, ShardedTensor) and not any(isinstance(e, Tensor) for e in entries):
        return sliced(x, entries)
    like = source_among((x, *entries))
    basic, indices = without_masks(x, entries, like.layout)
    selected = sliced(x, basic) if isinstance(x, ShardedTensor) else x[tuple(basic)]
    return _at(selected, indices, like)


def is_mask(index: Tensor) -> bool:
    """Returns whether a tensor in an index selects elements by flags."""
    return index.dtype in (torch.bool, torch.uint8)


def entries_of(x: Tensor, index: Any) -> list[Any]:
    """Expands an index to an integer, a slice or a tensor for each dim, and `None`.

    Raises:
        IndexError: there are more entries than dims.
    """
    if isinstance(index, list):  # in torch a list with more than integers means a tuple
        more = any(not isinstance(entry, (bool, int)) for entry in index)
        index = tuple(index) if more else torch.tensor(index)
    given = index if isinstance(index, tuple) else (index,)
    return full_index(tuple(_as_torch(x, entry) for entry in given), x.dim())


def _as_torch(x: Tensor, entry: Any) -> Any:
    """Converts an entry of an index to an integer, a slice, `None`, an Ellipsis or a tensor."""
    if isinstance(entry, bool):
        raise refusal(_GET, (x,), {}, f"an index {entry}")
    if entry is None or isinstance(entry, (slice, type(...))):
        return entry
    if isinstance(entry, Tensor):
        is_integer = entry.dim() == 0 and entry.dtype != torch.bool
        return int(entry) if is_integer else entry
    if isinstance(entry, Sequence) or hasattr(entry, "__array__"):
        entry = torch.as_tensor(entry)
        return entry if entry.dim() else entry.item()
    return operator.index(entry)


def require_mask_shape(x: Tensor, mask: Tensor, dim: int = 0) -> None:
    """Raises `IndexError` unless a mask has the extents of `x` from a dim on."""
    if mask.shape != x.shape[dim : dim + mask.dim()]:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {dim} does not match the "
            f"shape of the indexed tensor {list(x.shape)}"
        )


def without_masks(
    x: Tensor, entries: Sequence[Any], layout: Layout
) -> tuple[list[Any], dict[int, Tensor]]:
    """Returns the index with full slices for tensors, and the tensors by dim of the selection.

    A mask over several dims becomes as many tensors, with the indices of its ones.

    Args:
        x: the tensor.
        entries: of the index, in full.
        layout: of a sharded tensor among them.
    """
    basic: list[Any] = []
    tensors: dict[int, Tensor] = {}
    at = dim = 0
    for entry in entries:
        given = [entry]
        if isinstance(entry, Tensor) and is_mask(entry):
            require_mask_shape(x, entry, dim)
            if not isinstance(entry, ShardedTensor):
                prove_equal(entry, layout)
            given = list(entry.nonzero(as_tuple=True))
        for each in given:
            if isinstance(each, Tensor):
                tensors[at] = each
                basic.append(slice(None))
            else:
                basic.append(each)
            at += not isinstance(each, int)
            dim += each is not None
    return basic, tensors


def layout_of_indices(indices: Iterable[Tensor], source: Layout) -> Layout:
    """Returns the layout of broadcast indices, split where they are and axes of `source` are free.

    Args:
        indices: sharded and plain ones.
        source: of the tensor from which they select.
    """
    indices = list(indices)
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    splits: list[Split | None] = [None] * len(shape)
    if any(isinstance(index, ShardedTensor) for index in indices):
        splits = [
            None if split is None or set(split.axes) & set(source.used_axes) else split
            for split in broadcast_layout(indices).splits
        ]
    return Layout(source.mesh, shape, splits)


def selected_layout(source: Layout, dims: Collection[int], index: Layout) -> Layout:
    """Returns the layout of the elements that indices along some dims select.

    Args:
        source: of the tensor; these dims are not split.
        dims: those with indices.
        index: of the broadcast indices.
    """
    first = min(dims)
    # Order of dims as in torch: in place if the indexed dims are adjacent, else in front.
    if max(dims) - first >= len(dims):
        first = 0
    rest = [d for d in range(len(source.shape)) if d not in dims]
    before, after = rest[:first], rest[first:]

    def around(of_source: Sequence[Any], of_index: Sequence[Any]) -> list[Any]:
        return [*(of_source[d] for d in before), *of_index, *(of_source[d] for d in after)]

    shape = around(source.shape, index.shape)
    return Layout(source.mesh, shape, around(source.splits, index.splits))


def _at(x: Tensor, indices: Mapping[int, Tensor], like: ShardedTensor) -> ShardedTensor:
    """Returns the elements at indices along some dims."""
    if isinstance(x, ShardedTensor):
        source = x.layout.replace(changes=dict.fromkeys(indices))
    else:
        source = Layout(like.mesh, tuple(x.shape), [None] * x.dim())
    common = layout_of_indices(indices.values(), source)
    out = selected_layout(source, indices, common)
    own = {
        d: operand_in(index, layout_of_operand(index, common, common.shape), out)
        for d, index in indices.items()
    }
    selected = tuple(own.get(d, slice(None)) for d in range(x.dim()))
    return wrap(operand_in(x, source, out)[selected], out, like)


@implements(torch.index_select, torch.Tensor.index_select)
@numpy_names
def index_select(input: Tensor, dim: int, index: Tensor) -> ShardedTensor:
    """Selects elements along one dim; a split dim is gathered first.

    Raises:
        IndexError: the index is not a vector.
        RuntimeError: the index is not of integers, or one of them is negative.
    """
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    own = local_of(index) if isinstance(index, ShardedTensor) else index
    torch._assert_async((own >= 0).all(), "index_select(): index out of range: it is negative")
    like = source_among((input, index))
    return _at(input, {canonical(dim, input.dim()): index.reshape(-1)}, like)


@implements(torch.gather, torch.Tensor.gather)
@numpy_names
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> ShardedTensor:
    """Selects elements along a dim, by one index per result element; the dim is gathered."""
    d = canonical(dim, input.dim())
    others = [i for i in range(input.dim()) if i != d]
    if index.dim() != input.dim() or any(index.shape[i] > input.shape[i] for i in others):
        raise RuntimeError(
            f"Size does not match at dimension {d}: expected index {list(index.shape)} to be no "
            f"larger than self {list(input.shape)} apart from dimension {d}"
        )
    # In the other dims torch reads only the input within the extents of the index.
    input = input[tuple(slice(None) if i == d else slice(n) for i, n in enumerate(index.shape))]
    like = input if isinstance(input, ShardedTensor) else index
    assert isinstance(like, ShardedTensor)
    splits = [None if i == d else split for i, split in enumerate(like.layout.splits)]
    source = Layout(like.mesh, tuple(input.shape), splits)
    out = source.replace(shape=tuple(index.shape))
    local = torch.gather(operand_in(input, source, out), d, operand_in(index, out, out))
    return wrap(local, out, like)


@implements(torch.take_along_dim, torch.Tensor.take_along_dim)
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> ShardedTensor:
    """Selects elements along a dim, by indices that broadcast over the other dims."""
    if dim is None:
        return gather(input.reshape(-1), 0, indices.reshape(-1))
    d = canonical(dim, input.dim())
    sizes = [(1, 1) if i == d else (a, b) for i, (a, b) in
             enumerate(zip(input.shape, indices.shape, strict=True))]  # fmt: skip
    common = torch.broadcast_shapes(*zip(*sizes, strict=True))
    source, index = (
        x.expand([x.shape[d] if i == d else n for i, n in enumerate(common)])
        for x in (input, indices)
    )
    return gather(source, d, index)


@implements(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ShardedTensor:
    """Looks up rows of a table at sharded indices."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise refusal(F.embedding, (input, weight), {}, "only padding_idx is possible")
    if not isinstance(input, ShardedTensor) or isinstance(weight, ShardedTensor):
        raise refusal(F.embedding, (input, weight), {}, "the indices are plain, the table sharded")
    old = input.layout
    layout = Layout(old.mesh, (*old.shape, weight.shape[1]), (*old.splits, None))
    # The backward of its backward refuses a block without indices.
    indices = with_elements(local_of(input))
    local = F.embedding(indices, parameter_for(weight, layout), padding_idx)
    return wrap(without_added(local, layout.local_shape), layout, input)
