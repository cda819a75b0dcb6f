"""3D U-Net: the class of each voxel, by cross-entropy, Dice or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pydist.errors import UsageError
from pydist.models import UNet3d
from pydist.tensor import ShardedTensor
from pydist.train import segmentation_report
from pydist.train.gather import on_first_rank
from pydist.train.losses import confusion, dice_scores, segmentation_loss
from pydist.train.tasks.base import Validation, call_of

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch
    from pydist.train.config import UNet3dConfig

_LOSSES = ("cross_entropy", "dice", "dice_ce")


@dataclass(frozen=True)
class SegmentationValidation(Validation):
    """How well each class was found."""

    class_names: tuple[str, ...]
    dice: Tensor
    """`[samples, classes - 1]`: Dice of each volume and class but background; NaN where a class is
    neither there nor predicted."""
    pooled: Tensor
    """`[classes - 1]`: Dice of the voxels of all volumes together."""

    def figures(self) -> dict[str, Any]:
        """Loss, and by class the mean over the volumes and the Dice of all voxels."""
        names = self.class_names[1:]
        return {
            "loss": self.loss,
            "dice": dict(zip(names, self.dice.nanmean(0).tolist(), strict=True)),
            "pooled_dice": dict(zip(names, self.pooled.tolist(), strict=True)),
        }


class Segmentation:
    """3D U-Net on volumes with labels; see `Task`."""

    def __init__(self, config: UNet3dConfig, loss: str) -> None:
        if loss not in ("auto", *_LOSSES):
            raise UsageError(
                f'train.loss is "{loss}"; possible for segmentation are {", ".join(_LOSSES)}'
            )
        self.config = config
        self._loss = "cross_entropy" if loss == "auto" else loss
        self._class_names: tuple[str, ...] = ()
        self._example: Tensor | None = None

    def check(self, data: ShardDataset) -> None:
        """The extents must be halved as often as the network does, and there must be labels."""
        if not data.labelled:
            raise UsageError(
                f"{data.root} has values of samples to predict, and model.name is "
                f'"{self.config.name}", which predicts the class of each voxel: choose "cosmoflow"'
            )
        multiple = 1 << self.config.levels
        for shape in {data.shape_of(i) for i in range(len(data))}:
            if any(extent % multiple for extent in shape[1:]):
                raise UsageError(
                    f"samples in {data.root} are {' × '.join(map(str, shape[1:]))} voxels, and "
                    f"model.levels {self.config.levels} needs multiples of {multiple}: convert "
                    f"them with --multiple {multiple}"
                )
        self._class_names = data.manifest.class_names

    def network(self, manifest: Manifest) -> nn.Module:
        """The U-Net."""
        try:
            return UNet3d(**self._arguments(manifest))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def expression(self, manifest: Manifest) -> str:
        """The call that makes the U-Net."""
        return call_of(UNet3d, self._arguments(manifest))

    def _arguments(self, manifest: Manifest) -> dict[str, Any]:
        return {
            "in_channels": manifest.sample_shape[0],
            "classes": len(manifest.class_names),
            "features": self.config.features,
            "levels": self.config.levels,
        }

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The loss that was chosen."""
        return segmentation_loss(self._loss, output, batch.targets)

    def measure(self, output: Tensor, batch: Batch) -> Tensor:
        """[N, 1 + classes²]: the batch's loss and each sample's confusion."""
        counts = confusion(output, batch.targets).double()
        loss = self.loss(output, batch).double().expand(len(counts), 1)
        predicted = output.argmax(1).cpu()
        if batch.indices[0] == 0 and isinstance(predicted, ShardedTensor):
            found = on_first_rank(predicted)
            self._example = None if found is None else found[0]
        return torch.cat([loss, counts.flatten(1)], dim=1)

    def judge(self, rows: Tensor) -> SegmentationValidation:
        """Dice by volume and of all voxels."""
        classes = len(self._class_names)
        counts = rows[:, 1:].view(-1, classes, classes)
        return SegmentationValidation(
            samples=len(rows),
            loss=float(rows[:, 0].mean()),
            class_names=self._class_names,
            dice=dice_scores(counts),
            pooled=dice_scores(counts.sum(0)),
        )

    def write_results(self, folder: Path, data: ShardDataset, validation: Validation) -> None:
        """A row a volume: the Dice of each class."""
        assert isinstance(validation, SegmentationValidation)
        files = [file.path for file in data.manifest.files if file.split == "val"]
        segmentation_report.write_dice(
            folder / segmentation_report.DICE_FILE,
            self._class_names[1:],
            files,
            validation.dice.numpy(),
        )

    def draw(
        self,
        folder: Path,
        curves: Mapping[str, Mapping[int, float]],
        data: ShardDataset,
        spatial: tuple[int, int, int],
    ) -> Path:
        """Loss, Dice, and a slice of a volume: image, truth, prediction."""
        example = None if self._example is None else self._example.numpy()
        return segmentation_report.draw_run(folder, curves, data, example, spatial)
