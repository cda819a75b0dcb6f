"""Losses that are written out as torch's formulas, of calls that have handlers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as legacy

from pydist.ops.dtypes import result_dtype
from pydist.tensor import implements

_EPSILON = 1e-12


def _reduced(values: Tensor, reduction: str, size_average: Any = None, reduce: Any = None) -> Any:
    if size_average is not None or reduce is not None:
        reduction = legacy.legacy_get_string(size_average, reduce)
    if reduction == "none":
        return values
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return values.mean() if reduction == "mean" else values.sum()


def _require_dims(name: str, *tensors: Tensor) -> None:
    if len({x.dim() for x in tensors}) > 1:
        shapes = ", ".join(str(list(x.shape)) for x in tensors)
        raise RuntimeError(f"{name}: expected tensors with equally many dims, not {shapes}")


@implements(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Computes the negative log likelihood of a normal distribution; variances below eps count."""
    if not isinstance(var, Tensor):
        var = var * torch.ones_like(input)
    if (var < 0).any():
        raise ValueError("var has negative entry/entries")
    if input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    elif input.shape != var.shape:
        others = [b for a, b in zip(input.shape, var.shape, strict=False) if a != b]
        if input.dim() != var.dim() or others != [1]:
            raise ValueError("var is of incorrect size")
    var = var.clone()
    with torch.no_grad():  # as in torch, values below have a gradient
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


@implements(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Computes max(0, -target (input1 - input2) + margin)."""
    _require_dims("margin_ranking_loss", input1, input2, target)
    # Autocast has a rule for the loss and, on a device, none for a difference.
    one = (1,)
    dtype = result_dtype(F.margin_ranking_loss, (one, input1), (one, input2), (one, target))
    input1, input2, target = (x.to(dtype) for x in (input1, input2, target))
    loss = (-target * (input1 - input2) + margin).clamp_min(0)
    return _reduced(loss, reduction, size_average, reduce)


@implements(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Computes the mean over the last dim of each label's binary cross entropy."""
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return _reduced(loss.sum(-1) / input.shape[-1], reduction, size_average, reduce)


@implements(F.multi_margin_loss)
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Computes the mean over classes of max(0, margin - x[target] + x)^p, without the target's."""
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 supported")
    scores, labels = (input[None], target.reshape(1)) if input.dim() == 1 else (input, target)
    if ((labels < 0) | (labels >= scores.shape[1])).any():
        raise RuntimeError("multi_margin_loss: target out of range")
    is_target = labels[:, None] == torch.arange(scores.shape[1], device=labels.device)
    own = torch.where(is_target, scores, 0).sum(1, keepdim=True)
    loss = F.relu(margin - own + scores) ** p  # whose gradient at 0 is 0, unlike clamp_min's
    if weight is not None:
        loss = loss * weight[labels][:, None]
    loss = torch.where(is_target, 0, loss).sum(1) / scores.shape[1]
    loss = loss[0] if input.dim() == 1 else loss
    return _reduced(loss, reduction, size_average, reduce)


@implements(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Computes 1 - cos of pairs with target 1, max(0, cos - margin) of those with target -1."""
    dim = target.dim()
    if dim > 1 or input1.dim() != dim + 1 or input2.dim() != dim + 1:
        raise RuntimeError(
            f"cosine_embedding_loss: {dim}D target tensor expects {dim + 1}D input tensors, but "
            f"found inputs with sizes {list(input1.shape)} and {list(input2.shape)}"
        )
    squares = [(x * x).sum(dim) + _EPSILON for x in (input1, input2)]
    cos = (input1 * input2).sum(dim) / (squares[0] * squares[1]).sqrt()
    zero = torch.zeros_like(cos)
    loss = torch.where(target == 1, 1 - cos, zero)
    loss = loss + torch.where(target == -1, (cos - margin).clamp_min(0), zero)
    return _reduced(loss, reduction, size_average, reduce)


@implements(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Computes max(0, margin + d(anchor, positive) - d(anchor, negative)) of p-norms."""

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return F.pairwise_distance(a, b, p, eps)

    found = _triplets(anchor, positive, negative, distance, margin, swap)
    return _reduced(found, reduction, size_average, reduce)


@implements(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """Computes the triplet margin loss of any distance."""
    distance = F.pairwise_distance if distance_function is None else distance_function
    return _reduced(_triplets(anchor, positive, negative, distance, margin, swap), reduction)


def _triplets(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
    margin: float,
    swap: bool,
) -> Tensor:
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    _require_dims("triplet margin loss", anchor, positive, negative)
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (margin + near - far).clamp_min(0)
