"""Losses and scores of segmentation: on plain tensors and on sharded ones, the same lines."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pydist.tensor import ShardedTensor

SMOOTH = 1e-5
"""Added to numerator and denominator of the soft Dice, as nnU-Net and MONAI do."""


def dice_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """1 less the soft Dice, mean over samples and classes; background does not count.

    By sample: so the mean over a batch is that over its parts, however they are spread.

    Args:
        scores: [N, C, D, H, W], C > 1; softmax makes them probabilities.
        labels: [N, D, H, W], integers below C.
    """
    shape = (1, scores.shape[1], 1, 1, 1)
    classes = torch.arange(scores.shape[1], device=scores.device).view(shape)
    truth = labels.unsqueeze(1) == classes
    probabilities = F.softmax(scores, 1)
    dims = (2, 3, 4)
    shared = torch.where(truth, probabilities, 0).sum(dims)
    sizes = probabilities.sum(dims) + truth.to(probabilities.dtype).sum(dims)
    dice = (2 * shared + SMOOTH) / (sizes + SMOOTH)
    return 1 - dice[:, 1:].mean()


def segmentation_loss(kind: str, scores: Tensor, labels: Tensor) -> Tensor:
    """The loss by its name in a configuration: "cross_entropy", "dice" or "dice_ce"."""
    if kind == "dice":
        return dice_loss(scores, labels)
    entropy = F.cross_entropy(scores, labels)
    return entropy + dice_loss(scores, labels) if kind == "dice_ce" else entropy


def confusion(scores: Tensor, labels: Tensor) -> Tensor:
    """How many voxels of each class were taken for which. Collective over the sample group.

    Args:
        scores: [N, C, D, H, W], sharded or plain.
        labels: [N, D, H, W], integers below C.

    Returns:
        [N, C, C] int64: sample, true class, predicted class; of the whole volumes, on every rank.
    """
    count = scores.shape[1]
    pairs = labels * count + scores.argmax(1)
    local = pairs.to_local() if isinstance(pairs, ShardedTensor) else pairs
    found = [torch.bincount(sample.flatten(), minlength=count**2) for sample in local]
    counts = torch.stack(found).view(len(local), count, count)
    if isinstance(pairs, ShardedTensor):
        pairs.mesh.sample.all_reduce(counts)
        counts //= pairs.layout.replicas
    return counts


def dice_scores(counts: Tensor) -> Tensor:
    """Dice of each class but background; NaN where a class is neither there nor predicted.

    Args:
        counts: [..., C, C], as `confusion` gives it.

    Returns:
        [..., C - 1] float64.
    """
    counts = counts.double()
    right = counts.diagonal(dim1=-2, dim2=-1)
    sizes = counts.sum(-1) + counts.sum(-2)
    return (2 * right / sizes)[..., 1:]
