"""Which keys a query attends to, by global position: masks, causal order, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pydist.ops.attention.blocks import KeyBlock
from pydist.ops.pointwise.keyed import Draw


@dataclass(frozen=True)
class Dropout:
    """Dropout of probabilities, which is keyed by the position of the score in the global batch.

    Attributes:
        draw: of the call, in the global shape of the scores.
        p: probability of 0.
        corner: position of this rank's first score; the last entry, of its first key, is 0.
        batch: extents of this rank's scores before queries and keys.
    """

    draw: Draw
    p: float
    corner: Sequence[int]
    batch: Sequence[int]

    def kept(self, queries: int, lo: int, hi: int, like: Tensor) -> Tensor:
        """Returns the factors, 0 or 1 / (1 - p), for keys lo to hi: [*batch, queries, keys].

        They are at least fp32: in half precision all would be too large, or all too small.
        """
        extents = [*self.batch, queries, hi - lo]
        drawn = self.draw.uniform([*self.corner[:-1], lo], extents)
        kept = (drawn >= self.p).to(torch.promote_types(like.dtype, torch.float32))
        return kept.div_(1 - self.p) if self.p < 1 else kept


@dataclass(frozen=True)
class Rules:
    """Rules that hold for this rank's queries and all keys.

    Attributes:
        scale: of the scores.
        first: global position of this rank's first query.
        is_causal: whether a query attends to the keys up to its own position only.
        mask: bool or additive, broadcastable to this rank's scores; `None` for none.
        dropout: of the probabilities; `None` without.
    """

    scale: float
    first: int
    is_causal: bool = False
    mask: Tensor | None = None
    dropout: Dropout | None = None

    def of_queries(self, begin: int, end: int) -> Rules:
        """Returns the rules of some of this rank's queries."""
        mask, dropout = self.mask, self.dropout
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[..., begin:end, :]
        if dropout is not None:
            corner = [*dropout.corner]
            corner[-2] += begin
            dropout = replace(dropout, corner=corner)
        return replace(self, first=self.first + begin, mask=mask, dropout=dropout)

    def all_keys(self, q: Tensor, keys: int) -> KeyBlock:
        """Returns the rules for all keys."""
        return self.block(q, 0, keys) or KeyBlock(self.scale)  # without a query or a key

    def block(self, q: Tensor, lo: int, hi: int) -> KeyBlock | None:
        """Returns the rules for the keys lo to hi; `None` if no query attends to one.

        Args:
            q: this rank's queries [..., queries, channels].
            lo: global position of the block's first key.
            hi: end of the block.
        """
        rows = q.shape[-2]
        if lo == hi or (self.is_causal and lo >= self.first + rows):
            return None
        mask = None if self.mask is None else _added(_columns(self.mask, lo, hi), q.dtype)
        is_causal = self.is_causal and hi > self.first + 1
        if is_causal and lo != self.first:
            mask, is_causal = _added(allowed(q, self.first, lo, hi), q.dtype), False
        return KeyBlock(self.scale, mask, is_causal, self._kept(q, lo, hi))

    def _kept(self, q: Tensor, lo: int, hi: int) -> Callable[[], Tensor] | None:
        dropout = self.dropout
        if dropout is None:
            return None

        def kept() -> Tensor:
            return dropout.kept(q.shape[-2], lo, hi, q)

        return kept


def allowed(q: Tensor, first: int, lo: int, hi: int) -> Tensor:
    """Returns whether each query, from position `first` on, attends to the keys lo to hi."""
    queries = torch.arange(first, first + q.shape[-2], device=q.device)
    return torch.arange(lo, hi, device=q.device) <= queries[:, None]


def _columns(mask: Tensor, lo: int, hi: int) -> Tensor:
    return mask if mask.shape[-1] == 1 else mask[..., lo:hi]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask that is added to scores; one in fp32 keeps its precision beside less."""
    if mask.dtype != torch.bool:
        is_finer = mask.dtype == torch.float32 and dtype.itemsize < torch.float32.itemsize
        return mask if is_finer else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)
