"""Defines the interface between the training loop and a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from pydist.errors import UsageError
from pydist.train import report

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch
    from pydist.train.config import MeshConfig, ModelConfig, TrainConfig


Criterion = Callable[[Tensor, Tensor], Tensor]
"""Computes a loss from the output and the targets of some samples."""


@dataclass(frozen=True)
class Validation:
    """Result that a validation has, equal on all ranks."""

    samples: int
    loss: float

    def figures(self) -> dict[str, Any]:
        """Returns the values for the log, besides the number of samples."""
        return {"loss": self.loss}


class Task(Protocol):
    """Task that a run trains for: a network with its loss, validation measures and final report."""

    @property
    def multiple(self) -> int | None:
        """Divisor that the extents of volumes must have, for `pydist predict`.

        `None` for tasks that do not predict classes of voxels.
        """
        ...

    def check(self, data: ShardDataset) -> None:
        """Raises `UsageError` if the network can't be trained on this data set."""
        ...

    def network(self, manifest: Manifest) -> nn.Module:
        """Creates the network for a data set, with initial weights."""
        ...

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that creates the same network."""
        ...

    @property
    def weighs_targets(self) -> bool:
        """Whether the loss of some samples depends on the targets of all samples of the step."""
        ...

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the loss of some of a step's samples: of a pass, or of a micro-batch in stages.

        The mean of these losses, weighted by their samples, is the loss of the step. All ranks call
        this before the forward pass, so it may be collective.

        Args:
            batches: the group's samples in all passes of the step if `weighs_targets`, else those
                of the pass that follows.
        """
        ...

    def measure(self, output: Tensor, batch: Batch) -> Tensor:
        """Measures each sample for validation: [N, ...] float64, equal on the group's ranks."""
        ...

    def judge(self, rows: Tensor) -> Validation:
        """Computes the validation from all samples' rows, in the order of the data set.

        Rows of samples that were skipped are NaN: take `rows[measured_rows(rows)]`.
        """
        ...

    def write_results(self, folder: Path, data: ShardDataset, validation: Validation) -> None:
        """Writes the table of the last validation. On rank 0."""
        ...

    def draw(
        self,
        folder: Path,
        curves: Mapping[str, Mapping[int, float]],
        data: ShardDataset,
        mesh: MeshConfig,
    ) -> Path:
        """Draws `result.png` after `write_results`. On rank 0.

        Args:
            folder: the run's folder.
            curves: training loss by step, by the name of the run.
            data: the training set.
            mesh: the configuration of the grid of ranks, whose blocks are shown.
        """
        ...

    # Optional: `predicts_classes`, true of tasks whose network scores the classes of samples.

    # Optional: draw_sample(path, data, validation) draws a picture after each validation, on rank
    # 0. `data` is the validation set.


def measured_rows(rows: Tensor) -> Tensor:
    """Returns which rows are of samples that were measured, and not skipped, [N] bool."""
    return ~rows.flatten(1).isnan().all(1)


def call_of(network: type[nn.Module], arguments: Mapping[str, Any]) -> str:
    """Returns the Python expression of a call."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{network.__module__}.{network.__name__}({given})"


def refuse_options_of_voxels(config: ModelConfig, train: TrainConfig) -> None:
    """Checks that no option is set that only the classes of voxels have.

    Raises:
        UsageError: one is.
    """
    for option in ("class_weights", "ignore_label"):
        if getattr(train, option) is not None:
            raise UsageError(
                f'train.{option} is for segmentation, and model.name = "{config.name}" predicts no '
                'classes of voxels: leave it out, or choose model.name = "unet3d"'
            )


@dataclass(frozen=True)
class SampleValidation(Validation):
    """Result of a validation, with what the network predicts for each sample."""

    predicted: Tensor
    """`[samples, outputs]`, in the order of `true`."""
    true: Tensor
    """`[samples, outputs]`."""


class SampleReport:
    """The part of a task that does not depend on what it predicts for a sample."""

    multiple: int | None = None
    weighs_targets = False  # losses are means over samples
    predicts_classes = False  # of samples

    def write_results(self, folder: Path, data: ShardDataset, validation: Validation) -> None:
        """Writes one row per sample: its true and predicted values."""
        assert isinstance(validation, SampleValidation)
        report.write_predictions(
            folder / report.PREDICTIONS_FILE,
            data.manifest.target_names,
            validation.predicted.numpy(),
            validation.true.numpy(),
        )

    def draw_sample(self, path: Path, data: ShardDataset, validation: Validation) -> None:
        """Draws predicted over true values."""
        assert isinstance(validation, SampleValidation)
        names = data.manifest.target_names
        report.draw_sample(path, names, validation.predicted.numpy(), validation.true.numpy())

    def draw(
        self,
        folder: Path,
        curves: Mapping[str, Mapping[int, float]],
        data: ShardDataset,
        mesh: MeshConfig,
    ) -> Path:
        """Draws loss, predictions, and a sample with its blocks."""
        return report.draw_run(folder, curves, data, mesh)
