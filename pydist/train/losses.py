"""Computes losses and scores of segmentation, for plain and for sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from pydist.comm.interface.reduction import WIDER
from pydist.global_loss import sum_over_groups
from pydist.tensor import ShardedTensor
from pydist.tensor.sharded import whole_of

if TYPE_CHECKING:
    from pydist.mesh import Mesh

SMOOTH = 1e-5
"""Added to numerator and denominator of the soft Dice, as in nnU-Net and MONAI."""

_NOTHING = -100
"""torch's default for ignored labels; no label has this value."""


@dataclass
class SegmentationLoss:
    """Loss that is a cross-entropy, a soft Dice, or their sum.

    With class weights or an ignored label the cross-entropy is the weighted mean over all voxels of
    the global batch, the same in all sample groups. Without them it is a mean over samples, as the
    Dice always is.

    Args:
        kind: "cross_entropy", "dice" or "dice_ce".
        class_weights: weight of each class in the cross-entropy; by default all are 1.
        ignore_label: label of excluded voxels; one of the classes, or another number.
    """

    kind: str
    class_weights: tuple[float, ...] | None = None
    ignore_label: int | None = None
    _weights: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def has_entropy(self) -> bool:
        """Whether the loss contains the cross-entropy."""
        return self.kind != "dice"

    @property
    def has_dice(self) -> bool:
        """Whether the loss contains the Dice."""
        return self.kind != "cross_entropy"

    @property
    def weighted(self) -> bool:
        """Whether voxels may have different weights."""
        return self.class_weights is not None or self.ignore_label is not None

    def __call__(
        self, scores: Tensor, labels: Tensor, mesh: Mesh | None = None, *, counts: bool = True
    ) -> Tensor:
        """Computes a group's loss, such that the mean over groups is the loss of the global batch.

        Collective over all ranks of the mesh. The loss is 0 if all voxels are excluded.

        Args:
            scores: [N, C, D, H, W], sharded or plain.
            labels: [N, D, H, W], integers.
            mesh: the mesh whose sample groups train together, if any.
            counts: False if the group's samples are padding.

        Returns:
            A scalar. Its gradient, averaged over groups weighted by their samples, is that of the
            global batch (see `pydist.batches`).
        """
        parts = []
        if self.has_entropy and self.weighted:
            sums = self.entropy_sums(scores, labels).sum(0)
            if not counts:
                sums = sums * 0  # keeps the graph: all groups exchange gradients
            parts.append(ratio(sums if mesh is None else sum_over_groups(sums, mesh)))
        elif self.has_entropy:
            parts.append(F.cross_entropy(scores, labels))
        if self.has_dice:
            parts.append(dice_loss(scores, labels, self.ignore_label).mean())
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def of_parts(
        self, labels: Sequence[Tensor], mesh: Mesh, samples: int
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the loss of a part of a batch; the mean over the parts is the loss of the batch.

        Collective over all ranks of the mesh.

        Args:
            labels: of the sample group's batch, one tensor for each pass.
            mesh: the mesh whose sample groups train together.
            samples: of all groups.
        """
        if not (self.has_entropy and self.weighted):
            return self
        total = torch.zeros(1, dtype=torch.float64)
        for each in labels:
            weights = self._voxel_weights(each, self._weights_on(each.device), torch.float64)
            total += whole_of(_sums(weights)).sum().cpu()
        mesh.data.all_reduce(total)
        a_sample = (float(total) or 1.0) / samples

        def loss(scores: Tensor, labels: Tensor) -> Tensor:
            entropy = self.entropy_sums(scores, labels).sum(0)[0] / (a_sample * labels.shape[0])
            if not self.has_dice:
                return entropy
            return entropy + dice_loss(scores, labels, self.ignore_label).mean()

        return loss

    def entropy_sums(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Sums weighted cross-entropy and weight over each sample's voxels, [N, 2].

        Collective over the sample group. `ratio` converts the sums to a mean.
        """
        # Under autocast a network in stages does not know the dtype, which is not wider than this.
        mixed = torch.is_autocast_enabled(scores.device.type)
        dtype = torch.float32 if mixed else WIDER.get(scores.dtype, scores.dtype)
        weights = self._weights_on(scores.device)
        weights = None if weights is None else weights.to(dtype)
        entropy = F.cross_entropy(
            scores.to(dtype), labels, weights, ignore_index=self._ignored, reduction="none"
        )
        weight = self._voxel_weights(labels, weights, dtype)
        return whole_of(torch.stack([_sums(entropy), _sums(weight)], 1))

    @property
    def _ignored(self) -> int:
        return _NOTHING if self.ignore_label is None else self.ignore_label

    def _voxel_weights(self, labels: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns the weight of each voxel, from the weights of the classes."""
        kept = labels != self._ignored
        weight = kept.to(dtype)
        if weights is None:
            return weight
        of_label = F.embedding(torch.where(kept, labels, 0), weights.unsqueeze(1)).squeeze(-1)
        return weight * of_label

    def _weights_on(self, device: torch.device) -> Tensor | None:
        """Returns the classes' weights on a device, copied once."""
        if self.class_weights is None:
            return None
        if self._weights is None or self._weights.device != device:
            self._weights = torch.tensor(self.class_weights, dtype=torch.float64).to(device)
        return self._weights


def ratio(sums: Tensor) -> Tensor:
    """Computes the mean from sums of values and weights, [..., 2]; 0 where the weight is 0."""
    value, weight = sums.unbind(-1)
    return value / torch.where(weight > 0, weight, 1)


def dice_loss(scores: Tensor, labels: Tensor, ignore_label: int | None = None) -> Tensor:
    """Computes 1 minus the soft Dice of each sample, averaged over classes except background.

    The Dice is per sample, so that the mean over a batch does not depend on its distribution.

    Args:
        scores: [N, C, D, H, W], or of fewer dims, C > 1; softmax converts them to probabilities.
        labels: [N, D, H, W], integers.
        ignore_label: label of excluded voxels. If it is one of the classes, that class is excluded
            as well.

    Returns:
        [N]; 0 for a sample whose voxels are all ignored.
    """
    classes = scores.shape[1]
    numbers = torch.arange(classes, device=scores.device).view(
        1, classes, *[1] * (scores.dim() - 2)
    )
    truth = labels.unsqueeze(1) == numbers
    probabilities = F.softmax(scores, 1)
    if ignore_label is not None:
        kept = (labels != ignore_label).unsqueeze(1)
        truth = truth & kept
        probabilities = torch.where(kept, probabilities, 0)
    dims = tuple(range(2, scores.dim()))
    shared = torch.where(truth, probabilities, 0).sum(dims)
    sizes = probabilities.sum(dims) + truth.sum(dims)
    dice = (2 * shared + SMOOTH) / (sizes + SMOOTH)
    parts = [dice[:, first:end] for first, end in _runs(scored_classes(classes, ignore_label))]
    return whole_of(1 - (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mean(1))


def _sums(x: Tensor) -> Tensor:
    """Returns the sum over each sample of [N, D, H, W]."""
    return x.sum(tuple(range(1, x.dim())))


def scored_classes(classes: int, ignore_label: int | None) -> tuple[int, ...]:
    """Returns the classes that have a Dice: all but background and the ignored one."""
    return tuple(c for c in range(1, classes) if c != ignore_label)


def _runs(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Converts ascending numbers to slices: index lists would be copied to the device each step."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n:
            runs[-1] = runs[-1][0], n + 1
        else:
            runs.append((n, n + 1))
    return runs


def confusion(scores: Tensor, labels: Tensor, ignore_label: int | None = None) -> Tensor:
    """Counts voxels by true and predicted class. Collective over the sample group.

    Args:
        scores: [N, C, D, H, W], sharded or plain.
        labels: [N, D, H, W], integers.
        ignore_label: label of excluded voxels.

    Returns:
        [N, C, C] int64: sample, true class, predicted class; of the full volumes, on every rank.
    """
    count = scores.shape[1]
    pairs = labels * count + scores.argmax(1)
    if ignore_label is not None:
        pairs = torch.where(labels == ignore_label, count**2, pairs)
    local = pairs.to_local() if isinstance(pairs, ShardedTensor) else pairs
    found = [torch.bincount(sample.flatten(), minlength=count**2 + 1) for sample in local]
    counts = torch.stack([each[:-1].view(count, count) for each in found])
    if isinstance(pairs, ShardedTensor):
        pairs.mesh.sample.all_reduce(counts)
        counts //= pairs.layout.replicas
    return counts


def dice_scores(counts: Tensor) -> Tensor:
    """Computes the Dice of each class except background; NaN if neither present nor predicted.

    Args:
        counts: [..., C, C] from `confusion`.

    Returns:
        [..., C - 1] float64.
    """
    counts = counts.double()
    right = counts.diagonal(dim1=-2, dim2=-1)
    sizes = counts.sum(-1) + counts.sum(-2)
    return (2 * right / sizes)[..., 1:]
