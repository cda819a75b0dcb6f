"""Computes the attention of this rank's queries to one block of keys, with its sums.

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

from pydist.ops.dtypes import NARROW

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_MOST_ROUNDING = 1e-4
"""Largest rounding error of a logarithm of a sum, which is the relative error of the sum."""


class KeyBlock(NamedTuple):
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
    """Attention that some of the keys get, with their sum of exponentials, e^(top + rest).

    The sum has two parts: a mask may move all scores to numbers next to which its logarithm is
    smaller than their rounding.

    Attributes:
        out: mean of the values, [batch, heads, queries, channels].
        top: about the largest score, [batch, heads, queries]; -inf where no key is allowed.
        rest: logarithm of the rest of the sum, [batch, heads, queries].
    """

    out: Tensor
    top: Tensor
    rest: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> Partial:
    """Computes attention to a block of at least one key; the results are at least fp32."""
    if _is_fused(q, k, v, block):
        out, log_sum = _fused(
            q, k, v, 0.0, block.is_causal, attn_mask=block.mask, scale=block.scale
        )
        if block.mask is None or not _is_rounded_off(log_sum):
            if block.mask is not None:  # the kernel writes 0 in rows without an allowed key
                hidden = (block.mask == -math.inf).all(-1)
                log_sum = log_sum.masked_fill(hidden, -math.inf)
            return Partial(_wide(out), log_sum, torch.zeros_like(log_sum))
    scores = _scores(_wide(q), _wide(k), block)
    top = scores.amax(-1)
    weights = (scores - _finite(top)[..., None]).exp_()
    total = _not_0(weights.sum(-1))
    if block.kept is not None:
        weights *= block.kept().reshape(weights.shape)
    return Partial((weights @ _wide(v)).div_(total[..., None]), top, total.log())


def merge_partials(first: Partial | None, second: Partial) -> Partial:
    """Returns the attention to the keys of both."""
    if first is None:
        return second
    top = torch.maximum(first.top, second.top)
    base = _finite(top)
    of_first, of_second = ((each.top - base + each.rest).exp_() for each in (first, second))
    total = _not_0(of_first + of_second)
    out = first.out * (of_first / total)[..., None]
    out.addcmul_(second.out, (of_second / total)[..., None])
    return Partial(out, top, total.log())


def attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Partial, block: KeyBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a block's part of the gradients of queries, keys and values, at least in fp32.

    Args:
        grad: of the result, in the dtype of the queries.
        q: queries.
        k: keys of the block.
        v: values of the block.
        whole: attention to all keys.
        block: the block.
    """
    top = _finite(whole.top)
    log_sum = top + whole.rest
    if _is_fused(q, k, v, block) and (block.mask is None or not _is_rounded_off(log_sum)):
        dq, dk, dv = _fused_backward(
            grad, q, k, v, whole.out.to(q.dtype), log_sum, 0.0, block.is_causal,
            attn_mask=block.mask, scale=block.scale,
        )  # fmt: skip
        return _wide(dq), _wide(dk), _wide(dv)
    grad, q, k, v = (_wide(t) for t in (grad, q, k, v))
    weights = (_scores(q, k, block) - top[..., None]).sub_(whole.rest[..., None]).exp_()
    of_weights = grad @ v.mT
    used = weights
    if block.kept is not None:
        kept = block.kept().reshape(weights.shape)
        of_weights, used = of_weights * kept, weights * kept
    of_scores = weights * (of_weights - (grad * whole.out).sum(-1, keepdim=True))
    return (of_scores @ k) * block.scale, (of_scores.mT @ q) * block.scale, used.mT @ grad


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, block: KeyBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, keys and values, at least in fp32; differentiable."""
    grad, q, k, v = (_wide(t) for t in (grad, q, k, v))
    scores = _scores(q, k, block)
    weights = safe_softmax(scores)
    of_weights = grad @ v.mT
    used = weights
    if block.kept is not None:
        kept = block.kept().reshape(weights.shape)
        of_weights, used = of_weights * kept, weights * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    return (of_scores @ k) * block.scale, (of_scores.mT @ q) * block.scale, used.mT @ grad


def explicit(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> Tensor:
    """Computes attention to all keys with a tensor of all scores; differentiable."""
    dtype = q.dtype
    q, k, v = (_wide(t) for t in (q, k, v))
    weights = safe_softmax(_scores(q, k, block))
    return ((weights if block.kept is None else weights * block.kept()) @ v).to(dtype)


def safe_softmax(scores: Tensor) -> Tensor:
    """Returns the softmax over the last dim; 0 in rows where all scores are -inf, like torch."""
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0).softmax(-1).masked_fill(hidden, 0)


def _finite(top: Tensor) -> Tensor:
    """Returns the largest scores with 0 for -inf: exp(-inf - 0) is 0 where no key is allowed."""
    return top.masked_fill(top == -math.inf, 0)


def _not_0(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1)


def _is_rounded_off(log_sum: Tensor) -> bool:
    """Returns whether a mask has made a logarithm too large for the number of keys to show."""
    return bool((log_sum.abs() * torch.finfo(log_sum.dtype).eps > _MOST_ROUNDING).any())


def _scores(q: Tensor, k: Tensor, block: KeyBlock) -> Tensor:
    scores = q @ k.mT * block.scale
    if block.mask is not None:
        scores = scores + block.mask
    if block.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores


def _is_fused(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> bool:
    """Returns whether torch's kernel computes a block; its choice is local to a rank."""
    if q.device.type != "cpu" or block.kept is not None or not (q.numel() and k.numel()):
        return False
    choice = torch._fused_sdp_choice(q, k, v, block.mask, 0.0, block.is_causal, scale=block.scale)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


def _wide(x: Tensor) -> Tensor:
    """Returns half precision as fp32, in which torch computes attention, too."""
    return x.float() if x.dtype in NARROW else x
