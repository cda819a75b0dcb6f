"""The CosmoFlow task: predicts the parameters of a universe by least squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pydist.errors import UsageError
from pydist.models import CosmoFlow
from pydist.tensor import ShardedTensor
from pydist.train import report
from pydist.train.tasks.base import Criterion, Validation, call_of, measured_rows

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch
    from pydist.train.config import CosmoFlowConfig, MeshConfig, TrainConfig


@dataclass(frozen=True)
class RegressionValidation(Validation):
    """Validation with the predictions for each sample."""

    mae: float
    predicted: Tensor
    """`[samples, outputs]`, in the order of `true`."""
    true: Tensor
    """`[samples, outputs]`."""

    def figures(self) -> dict[str, Any]:
        """Returns loss and mean absolute error."""
        return {"loss": self.loss, "mae": self.mae}


class Regression:
    """Task of CosmoFlow on values of samples; see `Task`."""

    multiple = None

    def __init__(self, config: CosmoFlowConfig, train: TrainConfig) -> None:
        config.loss(train)  # raises if it is unknown
        for option in ("class_weights", "ignore_label"):
            if getattr(train, option) is not None:
                raise UsageError(
                    f"train.{option} is for segmentation, and CosmoFlow predicts no classes: leave "
                    'it out, or choose model.name = "unet3d"'
                )
        self.config = config

    def check(self, data: ShardDataset) -> None:
        """Checks that the samples are cubes of the network's width, with values to predict."""
        if data.labelled:
            raise UsageError(
                f"{data.root} has the class of each voxel to predict, and model.name is "
                '"cosmoflow", which predicts values of a sample: choose "unet3d"'
            )
        width = self.config.width
        if data.sample_shape[1:] != (width,) * 3:
            raise UsageError(
                f"model.width is {width}, but the samples in {data.root} are "
                f"{' × '.join(map(str, data.sample_shape[1:]))} voxels: set model.width to their "
                "width"
            )

    def network(self, manifest: Manifest) -> nn.Module:
        """Creates CosmoFlow."""
        return CosmoFlow(**self._arguments(manifest))

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that creates CosmoFlow."""
        return call_of(CosmoFlow, self._arguments(manifest))

    def _arguments(self, manifest: Manifest) -> dict[str, Any]:
        return {
            "width": self.config.width,
            "in_channels": manifest.sample_shape[0],
            "outputs": len(manifest.target_names),
            "batch_norm": self.config.batch_norm,
            "dropout": self.config.dropout,
            "variant": self.config.variant,
        }

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Computes the mean squared error."""
        return F.mse_loss(output, batch.targets)

    @property
    def weighs_targets(self) -> bool:
        """Returns that it does not: the loss is a mean over samples."""
        return False

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the mean squared error."""
        return F.mse_loss

    def measure(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns predicted and true values, [N, 2, outputs]."""
        if isinstance(output, ShardedTensor):
            output = output.full_tensor()
        return torch.stack([output.double(), batch.targets.double()], dim=1)

    def judge(self, rows: Tensor) -> RegressionValidation:
        """Computes the errors over all samples and outputs."""
        predicted, true = rows[measured_rows(rows)].unbind(1)
        error = predicted - true
        return RegressionValidation(
            samples=len(error),
            loss=float(error.square().mean()),
            mae=float(error.abs().mean()),
            predicted=predicted,
            true=true,
        )

    def write_results(self, folder: Path, data: ShardDataset, validation: Validation) -> None:
        """Writes one row per sample: each parameter's true and predicted value."""
        assert isinstance(validation, RegressionValidation)
        report.write_predictions(
            folder / report.PREDICTIONS_FILE,
            data.manifest.target_names,
            validation.predicted.numpy(),
            validation.true.numpy(),
        )

    def draw(
        self,
        folder: Path,
        curves: Mapping[str, Mapping[int, float]],
        data: ShardDataset,
        mesh: MeshConfig,
    ) -> Path:
        """Draws loss, predictions, and a universe with its blocks."""
        return report.draw_run(folder, curves, data.root, mesh)
