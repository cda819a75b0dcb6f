"""Computes losses of sharded tensors: values on the shards, then a global sum and count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as legacy

from pydist.comm.interface.reduction import WIDER
from pydist.layout import Layout
from pydist.ops.channels import with_channels
from pydist.ops.pointwise.elementwise import common_layout
from pydist.ops.reduction.reduce import reduce_sum
from pydist.tensor import HANDLERS, ShardedTensor, implements, refusal, wrap
from pydist.tensor.operands import (
    operand_for,
    operand_in,
    refuse_shard_shaped,
    require_broadcastable,
)


def _reduction(reduction: str, size_average: Any, reduce: Any) -> str:
    if size_average is None and reduce is None:
        return ("none", "mean", "sum")[legacy.get_enum(reduction)]
    return legacy.legacy_get_string(size_average, reduce)


def _reduced(values: ShardedTensor, reduction: str, count: Any) -> Any:
    if reduction == "none":
        return values
    if reduction == "sum":
        return reduce_sum(values)
    # In fp16 the sum of a full volume would overflow before the division.
    total = reduce_sum(values, dtype=WIDER.get(values.dtype))
    return (total / count).to(values.dtype)


def elementwise_loss(
    func: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    *args: Any,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
    size_average: Any = None,
    reduce: Any = None,
    **kwargs: Any,
) -> Any:
    """Computes a loss with one value per element; the mean is over the global element count."""
    if args:
        raise refusal(func, (input, target), kwargs, "give the options by keyword")
    is_by_sample = reduction == "batchmean" and func is F.kl_div
    reduction = _reduction("sum" if is_by_sample else reduction, size_average, reduce)
    # torch compares the sizes of blocks, which may be equal where those of the tensors are not.
    if target.shape != input.shape and func in _SAME_SIZE:
        raise ValueError(f"Target size {target.shape} must be the same as input size {input.shape}")
    if weight is not None and weight.shape != input.shape and func in _SAME_SIZE_OF_WEIGHT:
        raise ValueError("Weights and input must have the same size.")
    given = {"weight": weight, "pos_weight": pos_weight}
    weights = {name: each for name, each in given.items() if each is not None}
    operands = [input, target, *weights.values()]
    layout = common_layout(operands)
    like = next(o for o in operands if isinstance(o, ShardedTensor))
    if func is F.soft_margin_loss:
        require_broadcastable(target, input.shape)
    for each in weights.values():
        require_broadcastable(each, torch.broadcast_shapes(input.shape, target.shape))
    local = [operand_for(o, layout, layout.shape) for o in (input, target)]
    kwargs |= {name: operand_for(each, layout, layout.shape) for name, each in weights.items()}
    values = wrap(func(*local, reduction="none", **kwargs), layout, like)
    if weight is not None and func in _WEIGHTED_MEAN:
        return _reduced(values, reduction, weight.sum())
    loss = _reduced(values, reduction, max(1, values.numel()))
    return loss / input.shape[0] if is_by_sample else loss


_SAME_SIZE = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
_SAME_SIZE_OF_WEIGHT = (F.mse_loss, F.l1_loss, F.huber_loss)
# The mean of these losses divides by the sum of the weights, others by the element count.
_WEIGHTED_MEAN = (F.mse_loss, F.l1_loss)


@implements(F.l1_loss)
def l1_loss(input: Tensor, target: Tensor, **kwargs: Any) -> Any:
    """Computes L1 loss. torch passes `weight` to no override: it is read from torch's frame."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and "weight" not in kwargs:
        kwargs["weight"] = frame.f_locals.get("weight")
    return elementwise_loss(F.l1_loss, input, target, **kwargs)


for _loss in (
    F.mse_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.soft_margin_loss,
    F.poisson_nll_loss,
    F.hinge_embedding_loss,
):
    HANDLERS[_loss] = partial(elementwise_loss, _loss)


@implements(F.cross_entropy)
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes cross entropy over the channels, with class indices or probabilities."""
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    reduction = _reduction(reduction, size_average, reduce)
    return _class_loss(F.cross_entropy, input, target, weight, reduction, options)


@implements(F.nll_loss)
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Computes negative log likelihood over the channels, with class indices."""
    options = {"ignore_index": ignore_index}
    reduction = _reduction(reduction, size_average, reduce)
    return _class_loss(F.nll_loss, input, target, weight, reduction, options)


def _class_loss(
    func: Callable[..., Tensor],
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    options: dict[str, Any],
) -> Any:
    if not isinstance(x, ShardedTensor) or x.dim() < 2:
        raise refusal(func, (x, target), {}, "the input must be sharded, with a batch dim")
    x = with_channels(x, None)
    if isinstance(target, ShardedTensor) and target.dim() == x.dim():
        target = with_channels(target, None)
    layout = x.layout
    by_voxel = Layout(
        layout.mesh,
        (layout.shape[0], *layout.shape[2:]),
        (layout.splits[0], *layout.splits[2:]),
    )
    probabilities = target.dim() == x.dim()
    target_layout = layout if probabilities else by_voxel
    if not isinstance(target, ShardedTensor):
        refuse_shard_shaped(target, target_layout)
    if tuple(target.shape) != target_layout.shape:
        raise ValueError(
            f"target of shape {tuple(target.shape)}, but {target_layout.shape} is expected for "
            f"the input {layout.shape}"
        )
    labels = operand_for(target, target_layout, target_layout.shape)
    local = operand_for(x, layout, layout.shape)
    if weight is not None:
        whole = Layout(layout.mesh, tuple(weight.shape), [None] * weight.dim())
        weight = operand_in(weight, whole, layout)
    values = wrap(func(local, labels, weight, reduction="none", **options), by_voxel, x)
    if reduction != "mean" or probabilities:
        return _reduced(values, reduction, max(1, values.numel()))
    classes = labels.long()  # bytes would index as a mask
    kept = classes != options["ignore_index"]
    if weight is None:
        counted = kept.to(WIDER.get(local.dtype, local.dtype))
    else:
        counted = torch.where(kept, weight.detach()[torch.where(kept, classes, 0)], 0)
    return _reduced(values, reduction, reduce_sum(wrap(counted, by_voxel, x)))
