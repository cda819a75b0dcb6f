"""Attention of this rank's queries to one block of keys, with the logarithm of its sums.

Softmax over all keys is the mean of the softmaxes over blocks of them, weighted by the blocks' sums
of exponentials. So each block is computed alone, by torch's fused kernel where one returns that
sum, and the results are merged. In backward the same kernels get the result and the sum of all
keys: a block's part of each gradient needs no other block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(NamedTuple):
    """What attention of one block of keys needs besides queries, keys and values.

    Attributes:
        scale: of the scores.
        mask: added to the scores, broadcastable to [batch, heads, queries, keys]; `None` for none.
        is_causal: whether query i attends to the keys 0 to i of the block only.
        kept: draws factors of the probabilities, 0 or 1 / (1 - p); `None` without dropout.
    """

    scale: float
    mask: Tensor | None = None
    is_causal: bool = False
    kept: Callable[[], Tensor] | None = None


class Partial(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        out: mean of their values, [batch, heads, queries, channels].
        log_sum: logarithm of the sum of exponentials of the scores, [batch, heads, queries];
            -inf where no key is allowed.
    """

    out: Tensor
    log_sum: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Partial:
    """Computes attention to a block of at least one key; both results are at least fp32."""
    if _is_fused(q, k, v, block):
        out, log_sum = _fused(
            q, k, v, 0.0, block.is_causal, attn_mask=block.mask, scale=block.scale
        )
        if block.mask is not None:  # the kernel writes 0 in rows without an allowed key
            hidden = (block.mask == -math.inf).all(-1)
            log_sum = log_sum.masked_fill(hidden, -math.inf)
        return Partial(_wide(out), log_sum)
    scores = _scores(_wide(q), _wide(k), block)
    log_sum = scores.logsumexp(-1)
    weights = (scores - finite(log_sum)[..., None]).exp_()
    if block.kept is not None:
        weights *= block.kept().reshape(weights.shape)
    return Partial(weights @ _wide(v), log_sum)


def merged(first: Partial | None, second: Partial) -> Partial:
    """Returns the attention to the keys of both."""
    if first is None:
        return second
    log_sum = torch.logaddexp(first.log_sum, second.log_sum)
    total = finite(log_sum)
    out = first.out * (first.log_sum - total).exp_()[..., None]
    out.addcmul_(second.out, (second.log_sum - total).exp_()[..., None])
    return Partial(out, log_sum)


def attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a block's part of the gradients of queries, keys and values, at least in fp32.

    Args:
        grad: of the result, in the dtype of the queries.
        q: queries.
        k: keys of the block.
        v: values of the block.
        whole: attention to all keys, with finite sums (`finite`).
        block: the block.
    """
    if _is_fused(q, k, v, block):
        out, log_sum = whole.out.to(q.dtype), whole.log_sum
        dq, dk, dv = _fused_backward(
            grad, q, k, v, out, log_sum, 0.0, block.is_causal, attn_mask=block.mask,
            scale=block.scale,
        )  # fmt: skip
        return _wide(dq), _wide(dk), _wide(dv)
    grad, q, k, v = (_wide(t) for t in (grad, q, k, v))
    weights = (_scores(q, k, block) - whole.log_sum[..., None]).exp_()
    of_weights = grad @ v.mT
    used = weights
    if block.kept is not None:
        kept = block.kept().reshape(weights.shape)
        of_weights, used = of_weights * kept, weights * kept
    of_scores = weights * (of_weights - (grad * whole.out).sum(-1, keepdim=True))
    return (of_scores @ k) * block.scale, (of_scores.mT @ q) * block.scale, used.mT @ grad


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, keys and values from all keys; differentiable."""
    scores = _scores(q, k, block)
    weights = safe_softmax(scores)
    of_weights = grad @ v.mT
    used = weights
    if block.kept is not None:
        kept = block.kept().reshape(weights.shape)
        of_weights, used = of_weights * kept, weights * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    return (of_scores @ k) * block.scale, (of_scores.mT @ q) * block.scale, used.mT @ grad


def explicit(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
    """Computes attention to all keys with a tensor of all scores; differentiable."""
    weights = safe_softmax(_scores(q, k, block))
    return (weights if block.kept is None else weights * block.kept()) @ v


def safe_softmax(scores: Tensor) -> Tensor:
    """Returns the softmax over the last dim; 0 in rows where all scores are -inf, like torch."""
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)


def finite(log_sum: Tensor) -> Tensor:
    """Returns the logarithms with 0 for -inf: exp(score - 0) is 0 where no key is allowed."""
    return log_sum.masked_fill(log_sum == -math.inf, 0)


def _scores(q: Tensor, k: Tensor, block: Block) -> Tensor:
    scores = q @ k.mT * block.scale
    if block.mask is not None:
        scores = scores + block.mask
    if block.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores


def _is_fused(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
    """Returns whether torch's kernel computes a block; its choice is local to a rank."""
    if q.device.type != "cpu" or block.kept is not None or not (q.numel() and k.numel()):
        return False
    choice = torch._fused_sdp_choice(
        q, k, v, block.mask, 0.0, block.is_causal, scale=block.scale
    )
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
