"""Computes attention as products and a softmax of sharded scores: exact for every split."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.attention.rules import allowed
from pydist.ops.pointwise.dropout import dropout
from pydist.tensor import ShardedTensor, wrap


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    """Computes attention with a tensor of all scores, in the split that the products choose."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores: Any = query @ key.mT * factor
    if is_causal:
        mask = _causal(scores)
    if mask is None:
        weights = scores.softmax(-1)
    else:
        bool_mask = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if bool_mask else scores + mask
        # Like torch: a query that attends to no key has the result 0.
        hidden = scores.amax(-1, keepdim=True) == -math.inf
        weights = scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)
    if dropout_p > 0:
        weights = dropout(F.scaled_dot_product_attention, False, weights, dropout_p)
    return weights @ value


def _causal(scores: ShardedTensor) -> ShardedTensor:
    """Returns whether each score is of a key up to the query's own position."""
    layout, box = scores.layout, scores.layout.box
    local = allowed(scores._local, box.lo[-2], box.lo[-1], box.hi[-1])
    tokens = Layout(layout.mesh, layout.shape[-2:], layout.splits[-2:])
    return wrap(local, tokens, scores)
