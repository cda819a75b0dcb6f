"""Tasks of any network, which a function or a class of the user's choice makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pydist.check.factory import load_factory, load_object
from pydist.errors import UsageError, in_words
from pydist.tensor import ShardedTensor
from pydist.train import report
from pydist.train.tasks.base import (
    Criterion,
    Validation,
    measured_rows,
    refuse_options_of_voxels,
)
from pydist.train.tasks.regression import Regression
from pydist.train.tasks.segmentation import Segmentation

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch
    from pydist.train.config import FactoryConfig, MeshConfig, TrainConfig

_INPUTS = ("in_channels", "input_channels")
_OUTPUTS = ("out_channels", "num_classes", "classes", "outputs")
"""Names that libraries have for a network's numbers of channels and of outputs."""


def make_network(config: FactoryConfig, channels: int, outputs: int) -> nn.Module:
    """Makes the network of a configuration.

    Args:
        config: names the factory and its arguments.
        channels: of the data set.
        outputs: classes, or values to predict.

    Raises:
        UsageError: the factory can't be imported, does not accept the arguments, or fails.
    """
    factory = load_factory(config.factory)
    arguments = arguments_of(config, channels, outputs)
    try:
        return factory(**arguments)
    except UsageError:
        raise
    except Exception as error:  # a user's function may raise anything
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise UsageError(
            f"model.factory: {config.factory.rpartition(':')[2]}({given}): {in_words(error)}"
        ) from error


def arguments_of(config: FactoryConfig, channels: int, outputs: int) -> dict[str, Any]:
    """Returns the factory's arguments: those given, and the numbers that the data set has."""
    found = load_object(config.factory)
    try:
        accepted = () if isinstance(found, nn.Module) else inspect.signature(found).parameters
    except (TypeError, ValueError):  # some callables have no signature
        accepted = ()
    own: dict[str, Any] = {}
    for names, count in ((_INPUTS, channels), (_OUTPUTS, outputs)):
        if not any(name in config.args for name in names):
            own |= {name: count for name in names if name in accepted}
    return own | config.args


def expression_of(config: FactoryConfig, channels: int, outputs: int) -> str:
    """Returns the Python expression that makes the same network."""
    given = arguments_of(config, channels, outputs)
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    where, _, name = config.factory.rpartition(":")
    if where.endswith(".py"):
        return f"pydist.check.load_factory({config.factory!r})({arguments})"
    return f"{where}.{name}({arguments})"


class AnySegmentation(Segmentation):
    """Task of any network that predicts the class of each voxel.

    A network may return several outputs, of which the first one predicts (deep supervision). In
    training the loss is the weighted mean of theirs, with half the weight for each further one; the
    labels of those of other extents are the nearest ones (nnU-Net's form).
    """

    otherwise = 'model.task = "regression" or "classification"'

    def __init__(self, config: FactoryConfig, train: TrainConfig) -> None:
        """Keeps the settings that name the network; see `Segmentation`."""
        super().__init__(config, train)
        self.multiple = config.multiple
        self._made, self.described = config, f'model.task = "{config.task}"'

    def network(self, manifest: Manifest) -> nn.Module:
        """Makes the network."""
        return make_network(self._made, manifest.sample_shape[0], len(manifest.class_names))

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that makes the network."""
        return expression_of(self._made, manifest.sample_shape[0], len(manifest.class_names))

    def loss(self, output: Tensor | Sequence[Tensor], batch: Batch) -> Tensor:
        """Computes the configured loss, over all outputs."""
        mesh, counts = batch.inputs.mesh, batch.count > 0

        def of_one(scores: Tensor, labels: Tensor) -> Tensor:
            return self._loss(scores, labels, mesh, counts=counts)

        return _over_outputs(of_one, output, batch.targets)

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the configured loss, over all outputs."""
        of_one = super().criterion(batches)
        return lambda output, labels: _over_outputs(of_one, output, labels)

    def measure(self, output: Tensor | Sequence[Tensor], batch: Batch) -> Tensor:
        """Returns the sums of `Segmentation.measure`, of the first output."""
        return super().measure(first_of(output), batch)


class AnyRegression(Regression):
    """Task of any network that predicts values of a sample, [N, values]."""

    otherwise = 'model.task = "segmentation"'

    def __init__(self, config: FactoryConfig, train: TrainConfig) -> None:
        """Keeps the settings that name the network; see `Regression`."""
        super().__init__(config, train)
        self._made, self.described = config, f'model.task = "{config.task}"'

    def network(self, manifest: Manifest) -> nn.Module:
        """Makes the network."""
        return make_network(self._made, manifest.sample_shape[0], len(manifest.target_names))

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that makes the network."""
        return expression_of(self._made, manifest.sample_shape[0], len(manifest.target_names))


@dataclass(frozen=True)
class ClassificationValidation(Validation):
    """Validation that holds the predicted class of each sample."""

    accuracy: float
    """Fraction of the samples whose class is predicted."""
    predicted: Tensor
    """`[samples, 1]`, in the order of `true`."""
    true: Tensor
    """`[samples, 1]`."""

    def figures(self) -> dict[str, Any]:
        """Returns the loss and the accuracy."""
        return {"loss": self.loss, "accuracy": self.accuracy}


class AnyClassification:
    """Task of any network that predicts the class of a sample, by scores [N, classes]; see `Task`.

    The data set has one value for each sample: the number of its class, in the order of
    `class_names`.
    """

    multiple: int | None = None
    weighs_targets = False

    def __init__(self, config: FactoryConfig, train: TrainConfig) -> None:
        config.loss(train)  # raises if it is unknown
        refuse_options_of_voxels(config, train)
        self.config = config

    def check(self, data: ShardDataset) -> None:
        """Checks that the data set has one value for each sample, and names of classes."""
        manifest = data.manifest
        if data.labelled or len(manifest.target_names) != 1 or len(manifest.class_names) < 2:
            raise UsageError(
                f"{data.root}: classification needs one value for each sample, the number of its "
                "class, and names of at least two classes (class_names in dataset.json); it has "
                f"{len(manifest.target_names)} values and {len(manifest.class_names)} classes"
                f"{' of voxels' if data.labelled else ''}"
            )

    def network(self, manifest: Manifest) -> nn.Module:
        """Makes the network."""
        return make_network(self.config, manifest.sample_shape[0], len(manifest.class_names))

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that makes the network."""
        return expression_of(self.config, manifest.sample_shape[0], len(manifest.class_names))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Computes the mean cross-entropy."""
        return _cross_entropy(output, batch.targets)

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the mean cross-entropy."""
        return _cross_entropy

    def measure(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the cross-entropy, the predicted and the true class, [N, 3]."""
        scores = output.full_tensor() if isinstance(output, ShardedTensor) else output
        classes = batch.targets[:, 0].long()
        each = F.cross_entropy(scores.double(), classes, reduction="none")
        return torch.stack([each, scores.argmax(1).double(), classes.double()], 1)

    def judge(self, rows: Tensor) -> ClassificationValidation:
        """Computes loss and accuracy over all samples."""
        rows = rows[measured_rows(rows)]
        return ClassificationValidation(
            samples=len(rows),
            loss=float(rows[:, 0].mean()),
            accuracy=float((rows[:, 1] == rows[:, 2]).double().mean()),
            predicted=rows[:, 1:2],
            true=rows[:, 2:],
        )

    def write_results(self, folder: Path, data: ShardDataset, validation: Validation) -> None:
        """Writes one row per sample: its true and its predicted class."""
        assert isinstance(validation, ClassificationValidation)
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
        """Draws loss, classes, and a sample with its blocks."""
        return report.draw_run(folder, curves, data.root, mesh)


def first_of(output: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the output that predicts: the first of several."""
    return output if isinstance(output, Tensor) else output[0]


def _over_outputs(
    loss: Callable[[Tensor, Tensor], Tensor], output: Tensor | Sequence[Tensor], labels: Tensor
) -> Tensor:
    """Returns the weighted mean of the losses of all outputs."""
    if isinstance(output, Tensor):
        return loss(output, labels)
    total, weights = None, 0.0
    for i, scores in enumerate(output):
        resized = labels
        if scores.shape[2:] != labels.shape[1:]:
            channel = labels[:, None].to(scores.dtype)
            resized = F.interpolate(channel, size=scores.shape[2:], mode="nearest")[:, 0].long()
        part = loss(scores, resized) * 0.5**i
        total, weights = part if total is None else total + part, weights + 0.5**i
    if total is None:
        raise UsageError("the network returns no output")
    return total / weights


def _cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets[:, 0].long())
