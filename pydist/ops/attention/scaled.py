"""Handles `scaled_dot_product_attention` of sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.function import without_autocast
from pydist.layout import Layout, Split
from pydist.ops.attention.blocks import explicit
from pydist.ops.attention.forms import AttentionForm, Sizes, attention_form
from pydist.ops.attention.ring import Ring, ring_attention
from pydist.ops.attention.rules import Dropout, Rules, allowed
from pydist.ops.attention.written_out import written_out
from pydist.ops.empty import with_elements, without_added
from pydist.ops.pointwise.keyed import Draw
from pydist.ops.products.contraction import Labels, aligned, extents_of, splits_of
from pydist.tensor import ShardedTensor, implements, source_among, wrap

_FUNC = F.scaled_dot_product_attention


@implements(_FUNC)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes attention of queries to keys, [..., tokens, channels].

    Split queries stay. Split keys and values travel in a ring, are gathered, or stay where the
    queries are whole: see `pydist.ops.attention.forms`. Where channels are split, channels attend
    to channels and space is the contracted dim: the ranks add partial sums.
    """
    _check(query, key, value, attn_mask, dropout_p, is_causal)
    if enable_gqa:
        grouped = _grouped(query, key, value, attn_mask)
        return attention(*grouped, dropout_p, is_causal, scale).flatten(-4, -3)
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if any(_split_of(t, -1) is not None for t in (query, key, value)):
        return written_out(*call)
    place = _placed(call)
    form = place.form
    if form == "sum":
        return written_out(*call)
    local = _by_ring(call, place) if form == "ring" else _by_gathering(call, place)
    return wrap(local, place.result, source_among(call.tensors))


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool,
) -> None:  # fmt: skip
    """Refuses what torch refuses, before any exchange."""
    name, three = _FUNC.__name__, (query, key, value)
    if is_causal and mask is not None:
        raise RuntimeError(f"{name}: attn_mask and is_causal exclude each other")
    if not 0 <= dropout_p <= 1:
        raise UsageError(f"dropout probability {dropout_p}: 0 to 1 is possible")
    if min(t.dim() for t in three) < 2:
        dims = [t.dim() for t in three]
        raise RuntimeError(f"{name}: at least 2 dims expected, got {dims} of query, key and value")
    types = [str(t.dtype).removeprefix("torch.") for t in three]
    if torch.is_autocast_enabled(query.device.type):
        return  # which converts them
    if len(set(types)) > 1:
        raise RuntimeError(f"{name}: query, key and value of the same dtype expected, got {types}")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"{name}: attn_mask of {mask.dtype}; bool, float32 and {query.dtype} are possible"
        )


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    given_scale: float | None

    @property
    def tensors(self) -> list[Tensor]:
        given = (self.query, self.key, self.value, self.mask)
        return [t for t in given if t is not None]

    @property
    def scale(self) -> float:
        if self.given_scale is not None:
            return self.given_scale
        return 1 / math.sqrt(self.query.shape[-1]) if self.query.shape[-1] else 1.0


class _Place(NamedTuple):
    """Distribution that one call's operands get.

    Attributes:
        labels: of queries, keys, values and the mask.
        extents: of the labels.
        splits: of the labels, but not of keys ("s").
        keys: the split of the keys, if they are split.
        scores: layout of the scores, whose keys are whole.
        result: layout of the result.
        form: of the exchange.
    """

    labels: list[Labels]
    extents: dict[str, int]
    splits: dict[str, Split]
    keys: Split | None
    scores: Layout
    result: Layout
    form: AttentionForm


def _placed(call: _Call) -> _Place:
    most = max(t.dim() for t in call.tensors)
    batch = [f"b{i}" for i in range(most - 2, 0, -1)]
    labels: list[Labels] = [
        [*batch, *names][most - t.dim() :]
        for t, names in zip(call.tensors, ("le", "se", "sv", "ls"), strict=False)
    ]
    extents = extents_of(_FUNC, call.tensors, labels)
    out = [*batch, "l", "v"]
    splits = splits_of(call.tensors, labels, out, extents, whole=("s", "e", "v"))
    mesh = source_among(call.tensors).mesh

    def layout(names: Labels) -> Layout:
        return Layout(mesh, [extents[i] for i in names], [splits.get(i) for i in names])

    scores = layout([*batch, "l", "s"])
    keys = _split_of(call.key, -2) or _split_of(call.value, -2)
    if keys is not None and keys.partition.extent != extents["s"]:
        keys = None  # one key, for all
    form = _form(call, splits, keys, scores)
    if keys is not None and mesh.session.at_form is not None:
        mesh.session.at_form(form)
    return _Place(labels, extents, splits, keys, scores, layout(out), form)


def _form(
    call: _Call, splits: Mapping[str, Split], keys: Split | None, scores: Layout
) -> AttentionForm:
    if keys is None:
        return "gather"  # of nothing
    queries = splits.get("l")
    is_split = queries is not None and queries.axes == keys.axes
    is_free = not any(set(s.axes) & set(keys.axes) for s in splits.values())
    # A ring does not compute gradients of masks, and has no fused kernels for devices.
    is_ring = is_split and call.query.device.type == "cpu"
    is_ring = is_ring and not (call.mask is not None and call.mask.requires_grad)
    if not (is_ring or is_free) or call.key.shape[:-2] != call.value.shape[:-2]:
        return "gather"
    parts = keys.partition.parts
    batch = math.prod(max(1, n) for n in scores.shape[:-2])
    batch //= math.prod(s.partition.parts for s in scores.splits[:-2] if s is not None)
    channels = call.query.shape[-1] + call.value.shape[-1]
    rows, columns = scores.shape[-2:]
    return attention_form(Sizes(parts, max(1, batch), rows, columns, channels, is_split))


def _rules(call: _Call, place: _Place, mask: Tensor | None) -> Rules:
    """Returns the rules of this rank's queries."""
    box, like = place.scores.box, source_among(call.tensors)
    dropout = None
    if call.dropout_p > 0:
        draw = Draw(_FUNC, like, place.scores.shape)
        dropout = Dropout(draw, call.dropout_p, box.lo, box.shape[:-2])
    return Rules(call.scale, box.lo[-2], call.is_causal, mask, dropout)


def _by_ring(call: _Call, place: _Place) -> Tensor:
    """Computes this rank's part of the result with blocks of keys that travel."""
    assert place.keys is not None
    tensors, labels = call.tensors, place.labels
    of_keys = {i: s for i, s in place.splits.items() if i != "l"} | {"s": place.keys}

    def cut(which: slice, splits: Mapping[str, Split]) -> list[Tensor]:
        return aligned(tensors[which], labels[which], splits, place.extents, place.result)

    (q,), (k, v) = cut(slice(1), place.splits), cut(slice(1, 3), of_keys)
    mask = cut(slice(3, 4), place.splits)
    q, k, v = _as_autocast(q, k, v)
    batch = torch.Size(place.scores.box.shape[:-2])
    rules = _rules(call, place, _four_dims(mask[0], batch) if mask else None)
    joined = _four_dims(torch.cat([k, v], -1), batch)
    ring = _ring_of(place.keys, joined, source_among(call.tensors))
    q = _four_dims(q.expand(*batch, -1, -1), batch)
    with without_autocast(q.device):  # which would round the scores
        out = ring_attention(q, joined, rules, ring)
    return out.reshape(*batch, *out.shape[-2:])


def _ring_of(split: Split, joined: Tensor, like: ShardedTensor) -> Ring:
    mesh, batch, channels = like.mesh, tuple(joined.shape[:-2]), joined.shape[-1]
    return mesh.session.plan(
        ("ring", split, batch, channels), lambda: Ring(mesh, split, batch, channels)
    )


def _by_gathering(call: _Call, place: _Place) -> Tensor:
    """Computes this rank's part of the result from all keys."""
    q, k, v, *masks = aligned(call.tensors, place.labels, place.splits, place.extents, place.scores)
    rules = _rules(call, place, masks[0] if masks else None)
    if rules.dropout is not None:
        q, k, v = _as_autocast(q, k, v)
        with without_autocast(q.device):  # which would round the scores
            return explicit(q, k, v, rules.all_keys(q, k.shape[-2]))
    is_empty = not all(t.numel() for t in (q, k, v))
    q, k, v = with_elements(q), with_elements(k), with_elements(v)
    mask, is_causal = rules.mask, call.is_causal
    if is_causal and rules.first > 0:
        mask, is_causal = allowed(q, rules.first, 0, k.shape[-2]), False
    mask = None if mask is None else with_elements(mask)
    if is_empty:  # contiguous now, for which CPUs have a fused kernel without a second derivative
        out, _ = torch._scaled_dot_product_attention_math(
            q, k, v, mask, 0.0, is_causal, scale=call.given_scale
        )
    else:
        out = _FUNC(q, k, v, mask, 0.0, is_causal, scale=call.given_scale)
    return without_added(out, place.result.local_shape)


def _four_dims(x: Tensor, batch: Sequence[int]) -> Tensor:
    """Returns a tensor with the dims [batch, heads, ...], as torch's kernels need them.

    Args:
        x: of any number of dims, broadcastable to the batch dims and two more.
        batch: the extents of these.
    """
    x = x[(None,) * max(0, len(batch) + 2 - x.dim(), 4 - x.dim())]
    if x.dim() == 4:
        return x
    lead = len(batch) - 1
    if any(n != 1 for n in x.shape[:lead]):
        x = x.expand(*batch[:lead], *x.shape[lead:])
    return x.flatten(0, lead - 1)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Converts tensors to the dtype in which autocast computes attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) for t in tensors)


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the operands with the heads of queries divided into groups that share a key.

    Raises:
        RuntimeError: the numbers of heads do not fit together.
    """
    if min(t.dim() for t in (query, key, value)) < 3:
        raise RuntimeError("scaled_dot_product_attention: enable_gqa needs a dim of heads")
    heads, shared = query.shape[-3], key.shape[-3]
    if value.shape[-3] != shared or shared == 0 or heads % shared:
        raise RuntimeError(
            f"scaled_dot_product_attention: {heads} heads of queries, {shared} of keys and "
            f"{value.shape[-3]} of values; the first must be a multiple of the others, which are "
            "equal"
        )
    if mask is not None and mask.dim() > 2:
        is_single = mask.shape[-3] == 1
        mask = mask.unsqueeze(-3) if is_single else mask.unflatten(-3, (shared, heads // shared))
    query = query.unflatten(-3, (shared, heads // shared))
    return query, key.unsqueeze(-3), value.unsqueeze(-3), mask


def _split_of(x: Tensor, dim: int) -> Split | None:
    """Returns the split of a dim into several parts."""
    split = x.layout.splits[dim] if isinstance(x, ShardedTensor) else None
    return split if split is not None and split.partition.parts > 1 else None
