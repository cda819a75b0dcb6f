"""Defines the regression task, which predicts values of a sample by least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pydist.errors import UsageError
from pydist.models import CosmoFlow
from pydist.tensor import ShardedTensor
from pydist.train.tasks.base import (
    Criterion,
    SampleReport,
    SampleValidation,
    call_of,
    measured_rows,
    refuse_options_of_voxels,
)

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch
    from pydist.train.config import CosmoFlowConfig, ModelConfig, TrainConfig


@dataclass(frozen=True)
class RegressionValidation(SampleValidation):
    """Result of a validation, with the values that the network predicts for each sample."""

    mae: float

    def figures(self) -> dict[str, Any]:
        """Returns loss and mean absolute error."""
        return {"loss": self.loss, "mae": self.mae}


class Regression(SampleReport):
    """Task of a network that predicts values of a sample; see `Task`.

    Subclasses choose the network.

    Args:
        config: configuration of the network.
        train: configuration of the loop, with the loss.

    Raises:
        UsageError: the network does not support the loss, or an option is for segmentation.
    """

    otherwise = 'model.name = "unet3d"'

    def __init__(self, config: ModelConfig, train: TrainConfig) -> None:
        config.loss(train)  # raises if it is unknown
        refuse_options_of_voxels(config, train)
        self.config, self.described = config, f'model.name = "{config.name}"'

    def check(self, data: ShardDataset) -> None:
        """Checks that the data set has values to predict."""
        if data.labeled:
            raise UsageError(
                f"{data.root} has the class of each voxel to predict, and {self.described} "
                f"predicts values of a sample: choose {self.otherwise}"
            )

    def network(self, manifest: Manifest) -> nn.Module:
        """Creates the network for a data set, with initial weights."""
        raise NotImplementedError

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that creates the network."""
        raise NotImplementedError

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


class CosmoFlowRegression(Regression):
    """Task of CosmoFlow, which predicts the parameters of universes."""

    def __init__(self, config: CosmoFlowConfig, train: TrainConfig) -> None:
        """Keeps the settings of the network; see `Regression`."""
        super().__init__(config, train)
        self._made = config

    def check(self, data: ShardDataset) -> None:
        """Checks that the samples are cubes of the network's width, with values to predict."""
        super().check(data)
        width = self._made.width
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
            "width": self._made.width,
            "in_channels": manifest.sample_shape[0],
            "outputs": len(manifest.target_names),
            "batch_norm": self._made.batch_norm,
            "dropout": self._made.dropout,
            "variant": self._made.variant,
            "batch_norm_momentum": self._made.batch_norm_momentum,
        }
