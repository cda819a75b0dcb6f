"""Computes attention in a ring: queries stay, blocks of keys and values travel around the ranks.

Each rank computes the attention of its queries to the block that it holds, while the next block
arrives from its neighbor; partial results are merged by their sums of exponentials. In backward
the blocks travel again, followed by the sum of the gradients that the ranks have added so far. No
rank holds more than two blocks of either at a time.

Blocks of one exchange need equal extents, so shorter ones are padded; the padding is not used.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.exchange.adjoints import add_boxes, gather_box
from pydist.exchange.exchanger import Exchanger
from pydist.exchange.function import ExchangeFunction
from pydist.layout import Split
from pydist.ops.attention.blocks import (
    Partial,
    attend,
    attend_back,
    gradients,
    merge_partials,
)
from pydist.ops.attention.rules import Rules
from pydist.partition import Box

if TYPE_CHECKING:
    from pydist.mesh import Mesh

MOST_QUERIES = 1024
"""Queries of a rank that attend to a block at once: scores that are written out need less memory,
and messages of hosts make progress in between."""


class Ring:
    """The ranks among which keys are split, and their exchanges.

    Args:
        mesh: of the tokens.
        split: of the keys.
        batch: extents of this rank's keys before the tokens, the same on these ranks.
        channels: of keys and values together.
    """

    def __init__(self, mesh: Mesh, split: Split, batch: Sequence[int], channels: int) -> None:
        self.mesh = mesh
        self._group = group = mesh.group(split.axes)
        self.rank, self.size = group.rank, group.size
        self.blocks = split.intervals(mesh)
        """First key of each rank's block, and its end, in the order of the group."""
        self.longest = max(hi - lo for lo, hi in self.blocks)

        def box(lo: int, hi: int) -> Box:
            return Box([*(0 for _ in batch), lo, 0], [*batch, hi, channels])

        n = self.longest
        padded = [box(i * n, (i + 1) * n) for i in range(self.size)]
        following = [[padded[(i + 1) % self.size]] for i in range(self.size)]
        self.shift = Exchanger(group, padded, following)
        """Gives each rank the block of the next rank."""
        self._owned = [box(lo, hi) for lo, hi in self.blocks]
        self._whole = box(0, split.partition.extent)

    @cached_property
    def gather(self) -> Exchanger:
        """The exchanger that gives each rank all blocks."""
        return Exchanger(self._group, self._owned, [[self._whole]] * self.size)

    def padded(self, x: Tensor) -> Tensor:
        """Returns a block [..., keys, channels] with as many keys as the longest."""
        return F.pad(x, (0, 0, 0, self.longest - x.shape[-2])).contiguous()

    def block(self, step: int) -> tuple[int, int]:
        """Returns the block that this rank holds after so many exchanges."""
        return self.blocks[(self.rank + step) % self.size]

    def next_block(self, pending: Any, like: Tensor) -> Tensor:
        """Waits for the next rank's block."""
        slots = self.shift.empty_slots(like)
        with self.mesh.session.timers.measure("redistribute"):
            self.shift.finish(pending, slots)
        return slots[0]


def ring_attention(q: Tensor, keys_values: Tensor, rules: Rules, ring: Ring) -> Tensor:
    """Computes the attention of this rank's queries to the keys of all ranks. Differentiable.

    Args:
        q: this rank's queries [batch, heads, queries, channels].
        keys_values: this rank's keys and values [batch, heads, keys, channels of both]; batch and
            heads can be 1.
        rules: of this rank's queries.
        ring: the exchanges.

    Returns:
        [batch, heads, queries, channels of values].
    """
    result: Tensor = _RingAttention.apply(q, keys_values, rules, ring)
    return result


class _RingAttention(ExchangeFunction):
    part = None  # its products are computation; `Ring` measures the exchanges

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys_values: Tensor, rules: Rules, ring: Ring) -> Tensor:
        ctx.mesh, ctx.args = ring.mesh, (rules, ring)
        whole = _attend_to_all(q, keys_values, rules, ring)
        out = whole.out.to(q.dtype)
        ctx.save_for_backward(q, keys_values, out, whole.top, whole.rest)
        return out

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor) -> tuple[Any, ...]:
        q, keys_values, *whole = saved
        rules, ring = ctx.args
        if torch.is_grad_enabled():
            return *_general_gradients(grad, q, keys_values, rules, ring), None, None
        found = _gradients_of_all(grad, q, keys_values, Partial(*whole), rules, ring)
        return *found, None, None


def _attend_to_all(q: Tensor, keys_values: Tensor, rules: Rules, ring: Ring) -> Partial:
    """Computes the attention of this rank's queries to the keys of all ranks."""
    held = ring.padded(keys_values)
    q = _with_last_stride_1(q)
    parts = _parts(q)
    found: list[Partial | None] = [None for _ in parts]
    for step in range(ring.size):
        pending = ring.shift.start(held) if step + 1 < ring.size else None
        lo, hi = ring.block(step)
        k, v = _keys_and_values(q, held, hi - lo)
        for i, (begin, end) in enumerate(parts):
            some = q[..., begin:end, :]
            block = rules.of_queries(begin, end).block(some, lo, hi)
            if block is not None:
                found[i] = merge_partials(found[i], attend(some, k, v, block))
            ring.mesh.world.progress()
        if pending is not None:
            held = ring.next_block(pending, held)
    whole = [
        _nothing(q[..., begin:end, :], keys_values) if each is None else each
        for each, (begin, end) in zip(found, parts, strict=True)
    ]
    return Partial(*(torch.cat(each, 2) for each in zip(*whole, strict=True)))


def _nothing(q: Tensor, keys_values: Tensor) -> Partial:
    """Returns the attention of queries to no key."""
    channels = keys_values.shape[-1] - q.shape[-1]
    out = torch.zeros((*q.shape[:-1], channels), dtype=_wide_type(q), device=q.device)
    none = out.new_zeros(q.shape[:-1])
    return Partial(out, none, none)


def _gradients_of_all(
    grad: Tensor, q: Tensor, keys_values: Tensor, whole: Partial, rules: Rules, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the queries, and of this rank's keys and values."""
    q, grad = _with_last_stride_1(q), grad.contiguous()
    of_q = torch.zeros(q.shape, dtype=_wide_type(q), device=q.device)
    held = ring.padded(keys_values)
    following = None
    for step in range(ring.size):
        pending = ring.shift.start(held) if step + 1 < ring.size else None
        of_held = torch.zeros(held.shape, dtype=of_q.dtype, device=held.device)
        for begin, end in _parts(q):
            part = _Part(q, of_q, grad, whole, rules, begin, end)
            _add_gradients(part, held, of_held, *ring.block(step))
            ring.mesh.world.progress()
        if step == 0:
            of_own = of_held
        else:
            # The next rank has held this block before, and sends what has been added so far.
            if following is not None:
                of_held += ring.next_block(following, of_held)
            following = ring.shift.start(of_held)
        if pending is not None:
            held = ring.next_block(pending, held)
    if following is not None:
        of_own += ring.next_block(following, of_own)
    of_own = of_own[..., : keys_values.shape[-2], :]
    return of_q.to(q.dtype), of_own.to(keys_values.dtype)


class _Part:
    """Queries that are computed together, with their gradient, in backward."""

    def __init__(
        self, q: Tensor, of_q: Tensor, grad: Tensor, whole: Partial, rules: Rules,
        begin: int, end: int,
    ) -> None:  # fmt: skip
        self.q, self.of_q, self.grad = (t[..., begin:end, :] for t in (q, of_q, grad))
        self.whole = Partial(*(t[:, :, begin:end] for t in whole))
        self.rules = rules.of_queries(begin, end)


def _add_gradients(part: _Part, held: Tensor, of_held: Tensor, lo: int, hi: int) -> None:
    """Adds the gradients of some queries, and of the block of keys lo to hi, in place."""
    block = part.rules.block(part.q, lo, hi)
    if block is None:
        return
    k, v = _keys_and_values(part.q, held, hi - lo)
    dq, dk, dv = attend_back(part.grad, part.q, k, v, part.whole, block)
    part.of_q += dq
    channels = dq.shape[-1]
    of_k, of_v = of_held[..., : hi - lo, :channels], of_held[..., : hi - lo, channels:]
    of_k += dk.sum_to_size(of_k.shape)
    of_v += dv.sum_to_size(of_v.shape)


def _general_gradients(
    grad: Tensor, q: Tensor, keys_values: Tensor, rules: Rules, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Computes the same gradients from gathered keys and values, for double backward."""
    whole = gather_box(keys_values, ring.gather, ring.mesh, part="redistribute")
    total = whole.shape[-2]
    k, v = _keys_and_values(q, whole, total)
    of_q, of_k, of_v = gradients(grad, q, k, v, rules.all_keys(q, total))
    of_both = torch.cat([of_k, of_v], -1).sum_to_size(whole.shape)
    of_own = add_boxes(of_both, ring.gather, ring.mesh)
    return of_q.to(q.dtype), of_own.to(keys_values.dtype)


def _keys_and_values(q: Tensor, joined: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Returns the first keys and values of a padded block, for all heads of the queries."""
    both = joined[..., :keys, :].expand(*q.shape[:-2], -1, -1)
    channels = q.shape[-1]
    return both[..., :channels], both[..., channels:]


def _with_last_stride_1(x: Tensor) -> Tensor:
    """Returns the tensor as torch's kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _parts(q: Tensor) -> list[tuple[int, int]]:
    """Returns intervals of the queries that are computed one after another."""
    rows = q.shape[-2]
    return [(i, min(i + MOST_QUERIES, rows)) for i in range(0, max(1, rows), MOST_QUERIES)]


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
