"""Defines the segmentation task, which predicts the class of each voxel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from pydist.data.axes import without_flat
from pydist.errors import UsageError
from pydist.models import UNet3d
from pydist.tensor import ShardedTensor
from pydist.train import segmentation_report
from pydist.train.gather import gather_to_first_rank
from pydist.train.losses import (
    SegmentationLoss,
    confusion,
    dice_loss,
    dice_scores,
    ratio,
    scored_classes,
)
from pydist.train.tasks.base import Criterion, Validation, call_of, measured_rows

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch
    from pydist.train.config import MeshConfig, ModelConfig, TrainConfig, UNet3dConfig


@dataclass(frozen=True)
class SegmentationValidation(Validation):
    """Result of a validation, with the Dice that each class has."""

    class_names: tuple[str, ...]
    """Names of the classes with a Dice: all but background and an ignored class."""
    dice: Tensor
    """`[samples, classes]`: Dice of each volume and class; NaN where a class is neither present nor
    predicted."""
    pooled: Tensor
    """`[classes]`: Dice of the voxels of all volumes together."""

    def figures(self) -> dict[str, Any]:
        """Returns the loss and, by class, the mean Dice over volumes and the Dice of all voxels."""
        names = self.class_names
        return {
            "loss": self.loss,
            "dice": dict(zip(names, self.dice.nanmean(0).tolist(), strict=True)),
            "pooled_dice": dict(zip(names, self.pooled.tolist(), strict=True)),
        }


class Segmentation:
    """Task that predicts the class of each voxel; see `Task`. Subclasses choose the network.

    Args:
        config: configuration of the network.
        train: configuration of the loop, with the loss.

    Attributes:
        network_type: class of the network.
        multiple: required divisor of the extents of volumes.

    Raises:
        UsageError: the network does not support the loss, or its options conflict.
    """

    network_type: type[nn.Module]
    multiple = 1
    otherwise = 'model.name = "cosmoflow"'

    def __init__(self, config: ModelConfig, train: TrainConfig) -> None:
        kind = config.loss(train)
        if train.class_weights is not None and kind == "dice":
            raise UsageError(
                "train.class_weights weighs the classes in the cross-entropy, and train.loss is "
                '"dice": choose "cross_entropy" or "dice_ce", or leave the weights out'
            )
        if train.class_weights is not None and max(train.class_weights) < 1e-6:
            raise UsageError(
                f"train.class_weights = {list(train.class_weights)}: at least one must be 1e-6 or "
                "more"
            )
        self.config, self.described = config, f'model.name = "{config.name}"'
        self._loss = SegmentationLoss(kind, train.class_weights, train.ignore_label)
        self._class_names: tuple[str, ...] = ()
        self._shown: int | None = None
        """Number of the first validation volume of this group that was not skipped."""
        self._example: Tensor | None = None
        """The classes predicted there, on the first rank of the group."""
        self._needs_example = True  # of the running validation
        self._dims = 3
        self._slice: segmentation_report.Slice | None = None

    def check(self, data: ShardDataset) -> None:
        """Checks that the extents are multiples of `multiple`, and that there are labels."""
        if not data.labeled:
            raise UsageError(
                f"{data.root} has values of samples to predict, and {self.described} predicts the "
                f"class of each voxel: choose {self.otherwise}"
            )
        multiple = self.multiple
        self._dims = data.dims
        for shape in {without_flat(data.shape_of(i), data.dims) for i in range(len(data))}:
            if any(extent % multiple for extent in shape[1:]):
                raise UsageError(
                    f"samples in {data.root} are {' × '.join(map(str, shape[1:]))} voxels, and "
                    f"the network needs multiples of {multiple}: convert them with --multiple "
                    f"{multiple}, or choose fewer model.levels"
                )
        names = data.manifest.class_names
        weights, ignored = self._loss.class_weights, self._loss.ignore_label
        if weights is not None and len(weights) != len(names):
            raise UsageError(
                f"train.class_weights has {len(weights)} weights; {data.root} has {len(names)} "
                f"classes ({', '.join(names)})"
            )
        if not scored_classes(len(names), ignored):
            given = "" if ignored is None else f" with train.ignore_label = {ignored}"
            raise UsageError(f"{data.root} has no class but background{given}: nothing to learn")
        self._class_names = names

    def arguments(self, channels: int, classes: int) -> dict[str, Any]:
        """Returns the arguments of the network, for given numbers of channels and classes."""
        raise NotImplementedError

    def network(self, manifest: Manifest) -> nn.Module:
        """Creates the network for a data set, with initial weights."""
        try:
            return self.network_type(**self._arguments(manifest))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that creates the network."""
        return call_of(self.network_type, self._arguments(manifest))

    def _arguments(self, manifest: Manifest) -> dict[str, Any]:
        return self.arguments(manifest.sample_shape[0], len(manifest.class_names))

    @property
    def weighs_targets(self) -> bool:
        """Returns whether voxels have different weights in the cross-entropy."""
        return self._loss.has_entropy and self._loss.weighted

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the configured loss; weighted voxels count as in the global batch."""
        return self._loss_of(batches, lambda labels: labels)

    def _loss_of(self, batches: Sequence[Batch], resized: Callable[[Tensor], Tensor]) -> Criterion:
        """Returns the loss of an output whose labels `resized` computes from a batch's."""
        first = batches[0]
        mesh = first.inputs.mesh
        if not first.in_parts:  # without a wait of the host for the sum of the weights
            return partial(self._loss, mesh=mesh, counts=first.count > 0)
        labels = [resized(batch.targets) for batch in batches if batch.count]
        return self._loss.of_parts(labels, mesh, first.step_size)

    def measure(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns sums for the cross-entropy, Dice loss, and confusion, [N, 3 + classes²]."""
        labels, ignored = batch.targets, self._loss.ignore_label
        counts = confusion(output, labels, ignored).double()
        sums = counts.new_zeros(len(counts), 3)
        if self._loss.has_entropy:
            sums[:, :2] = self._loss.entropy_sums(output, labels)
        if self._loss.has_dice:
            sums[:, 2] = dice_loss(output, labels, ignored)
        predicted = output.argmax(1).cpu()
        is_first = self._needs_example and batch.inputs.mesh.data_index == 0
        if is_first and isinstance(predicted, ShardedTensor):
            self._keep_example(predicted, batch)
        return torch.cat([sums, counts.flatten(1)], dim=1)

    def _keep_example(self, predicted: ShardedTensor, batch: Batch) -> None:
        """Keeps the first volume of a batch that replaces no bad one. Collective over the group."""
        good = batch.weight.nonzero().flatten().tolist()  # equal on all ranks of the group
        found = gather_to_first_rank(predicted) if good else None
        self._shown = batch.indices[good[0]] if good else None
        self._example = None if found is None else found[good[0]]
        self._needs_example = not good

    def judge(self, rows: Tensor) -> SegmentationValidation:
        """Computes the loss, and the Dice by volume and of all voxels, at a validation's end."""
        self._needs_example = True
        classes = len(self._class_names)
        measured = measured_rows(rows)
        dice = dice_scores(rows[:, 3:].view(-1, classes, classes))  # NaN for skipped ones
        rows = rows[measured]
        counts = rows[:, 3:].view(-1, classes, classes)
        sums = rows[:, :2]
        # As in training: the mean is over voxels if their weights differ, else over samples.
        entropy = ratio(sums.sum(0)) if self._loss.weighted else ratio(sums).mean()
        scored = [c - 1 for c in scored_classes(classes, self._loss.ignore_label)]
        return SegmentationValidation(
            samples=len(rows),
            loss=float(entropy + rows[:, 2].mean()),
            class_names=tuple(self._class_names[c + 1] for c in scored),
            dice=dice[:, scored],
            pooled=dice_scores(counts.sum(0))[scored],
        )

    def write_results(self, folder: Path, data: ShardDataset, validation: Validation) -> None:
        """Writes one row per volume: the Dice of each class."""
        assert isinstance(validation, SegmentationValidation)
        table = data.manifest.table
        files = [table.sample(int(number)).file.path for number in table.samples_of("val")]
        segmentation_report.write_dice(
            folder / segmentation_report.DICE_FILE,
            validation.class_names,
            files,
            validation.dice.numpy(),
        )

    def draw_sample(self, path: Path, data: ShardDataset, validation: Validation) -> None:
        """Draws a slice of the first good validation volume: image, truth, prediction."""
        del validation
        if self._example is None or self._shown is None:
            return
        if self._slice is None or self._slice.number != self._shown:
            self._slice = segmentation_report.Slice(data, self._shown)
        self._slice.draw(path, self._volume_of(self._example))

    def _volume_of(self, labels: Tensor) -> npt.NDArray[Any]:
        """Returns predicted labels as [D, H, W]; images and lines have extents of 1 there."""
        found: npt.NDArray[Any] = labels[(None,) * (3 - labels.dim())].numpy()
        return found

    def draw(
        self,
        folder: Path,
        curves: Mapping[str, Mapping[int, float]],
        data: ShardDataset,
        mesh: MeshConfig,
    ) -> Path:
        """Draws loss, Dice, and a slice of a volume: image, truth, prediction."""
        example = None if self._example is None else self._volume_of(self._example)
        return segmentation_report.draw_run(folder, curves, data, example, self._shown or 0, mesh)


class UNet3dSegmentation(Segmentation):
    """Task that trains the 3D U-Net on volumes with labels."""

    network_type = UNet3d

    def __init__(self, config: UNet3dConfig, train: TrainConfig) -> None:
        """Stores the arguments of the network; see `Segmentation`."""
        super().__init__(config, train)
        self.multiple = 1 << config.levels
        self._made = {"features": config.features, "levels": config.levels}

    def arguments(self, channels: int, classes: int) -> dict[str, Any]:
        """Returns channels, classes, features and levels."""
        return {"in_channels": channels, "classes": classes, **self._made}
