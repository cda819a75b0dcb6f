"""Tasks of any network, which a function or a class of the user's choice makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pydist.check.factory import load_factory, load_object
from pydist.errors import DataError, DoesNotFit, UsageError, in_words, out_of_memory
from pydist.tensor.sharded import whole_of
from pydist.train.tasks.base import (
    Criterion,
    SampleReport,
    SampleValidation,
    measured_rows,
    refuse_options_of_voxels,
)
from pydist.train.tasks.regression import Regression
from pydist.train.tasks.segmentation import Segmentation

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch
    from pydist.train.config import FactoryConfig, TrainConfig

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
        DoesNotFit: it finds no memory.
    """
    factory = load_factory(config.factory)
    arguments = arguments_of(config, channels, outputs)
    try:
        return factory(**arguments)
    except UsageError:
        raise
    except Exception as error:  # a user's function may raise anything
        if out_of_memory(error):
            raise DoesNotFit(
                f"no memory for the network that {config.factory} makes: {in_words(error)}"
            ) from error
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

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the configured loss, over all outputs.

        The weights of the voxels are those of each output's own labels. Those of later passes are
        summed before their outputs exist, whose extents are taken to be in proportion to those of
        the volumes.
        """
        known: list[tuple[Criterion, Callable[[Tensor], tuple[int, ...]]]] = []

        def of_one(number: int, scores: Tensor, labels: Tensor) -> Tensor:
            own = tuple(scores.shape[2:])
            if number == len(known):  # by the output's number: groups differ in their extents
                here = partial(_in_proportion, tuple(labels.shape[1:]), own)
                known.append((self._loss_of(batches, lambda y: _resized(y, here(y))), here))
            loss, extents = known[number]
            if self.weighs_targets and extents(labels) != own:
                raise UsageError(
                    f"output {number + 1} of the network has extents {own} for a volume of "
                    f"{tuple(labels.shape[1:])}, and not {extents(labels)}, in proportion to those "
                    "in an earlier pass: with train.class_weights or train.ignore_label, possible "
                    "are volumes that the network's strides divide, or train.accumulate = 1"
                )
            return loss(scores, _resized(labels, own))

        return lambda output, labels: _over_outputs(of_one, self._scores(output), labels)

    def measure(self, output: Any, batch: Batch) -> Tensor:
        """Returns the sums of `Segmentation.measure`, of the first output."""
        return super().measure(self._scores(output)[0], batch)

    def _scores(self, output: Any) -> list[Tensor]:
        """Returns the outputs, the one that predicts first."""
        classes = len(self._class_names)
        found = outputs_of(output, self._dims)
        if not found or any(x.dim() != 2 + self._dims or x.shape[1] != classes for x in found):
            extents = ", ".join("DHW"[3 - self._dims :])
            raise _unexpected(output, f"[N, {classes}, {extents}]", "segmentation", "classes")
        return found


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

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the mean squared error."""
        return lambda output, targets: F.mse_loss(_values(output, targets), targets)

    def measure(self, output: Any, batch: Batch) -> Tensor:
        """Returns the rows of `Regression.measure`, of the only output."""
        return super().measure(_values(output, batch.targets), batch)


@dataclass(frozen=True)
class ClassificationValidation(SampleValidation):
    """Validation that holds the predicted class of each sample, `[samples, 1]`."""

    accuracy: float
    """Fraction of the samples whose class is predicted."""

    def figures(self) -> dict[str, Any]:
        """Returns the loss and the accuracy."""
        return {"loss": self.loss, "accuracy": self.accuracy}


class AnyClassification(SampleReport):
    """Task of any network that predicts the class of a sample, by scores [N, classes]; see `Task`.

    The data set has one value for each sample: the number of its class, in the order of
    `class_names`.
    """

    predicts_classes = True

    def __init__(self, config: FactoryConfig, train: TrainConfig) -> None:
        config.loss(train)  # raises if it is unknown
        refuse_options_of_voxels(config, train)
        self.config, self._classes = config, 0

    def check(self, data: ShardDataset) -> None:
        """Checks that the data set has one value for each sample, and names of classes."""
        manifest = data.manifest
        if data.labeled or len(manifest.target_names) != 1 or len(manifest.class_names) < 2:
            raise UsageError(
                f"{data.root}: classification needs one value for each sample, the number of its "
                "class, and names of at least two classes (class_names in dataset.json); it has "
                f"{len(manifest.target_names)} values and {len(manifest.class_names)} classes"
                f"{' of voxels' if data.labeled else ''}"
            )
        self._classes = len(manifest.class_names)

    def network(self, manifest: Manifest) -> nn.Module:
        """Makes the network."""
        return make_network(self.config, manifest.sample_shape[0], len(manifest.class_names))

    def expression(self, manifest: Manifest) -> str:
        """Returns the Python expression that makes the network."""
        return expression_of(self.config, manifest.sample_shape[0], len(manifest.class_names))

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the mean cross-entropy."""
        return self._cross_entropy

    def _cross_entropy(self, output: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._scores(output), self._numbers(targets))

    def _scores(self, output: Any) -> Tensor:
        """Returns the only output, [N, classes]."""
        found = outputs_of(output)
        if len(found) != 1 or found[0].dim() != 2 or found[0].shape[1] != self._classes:
            raise _unexpected(output, f"[N, {self._classes}]", "classification", "classes")
        return found[0]

    def _numbers(self, targets: Tensor) -> Tensor:
        """Returns the numbers of the samples' classes.

        Raises:
            DataError: on the host, one is not the number of a class. On a device, where a step does
                not wait for values, torch's kernel asserts it.
        """
        for value in targets[:, 0].tolist() if targets.device.type == "cpu" else ():
            if not 0 <= value < self._classes or value % 1:
                raise DataError(
                    f"a sample's class is {value:g}; there are {self._classes}, numbered from 0 on "
                    "in the order of class_names"
                )
        return targets[:, 0].long()

    def measure(self, output: Tensor, batch: Batch) -> Tensor:
        """Returns the cross-entropy, the predicted and the true class, [N, 3]."""
        scores, classes = self._scores(output), self._numbers(batch.targets)
        scores = whole_of(scores)
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


def first_of(output: Any, dims: int = 3) -> Tensor:
    """Returns the output that predicts: the first of several; see `outputs_of`.

    Raises:
        UsageError: the network has returned something else than tensors.
    """
    found = outputs_of(output, dims)
    if not found:
        raise UsageError(
            f"the network returns {type(output).__name__}; a tensor is needed, or several"
        )
    return found[0]


def outputs_of(output: Any, dims: int = 3) -> list[Tensor]:
    """Returns the outputs of a network: a tensor, several, or several in one, [N, outputs, C, ...].

    Anything else has none. MONAI's DynUNet returns several in one.

    Args:
        output: of the network.
        dims: number of spatial dims.
    """
    if isinstance(output, Tensor):
        return list(output.unbind(1)) if output.dim() == 3 + dims else [output]
    if isinstance(output, list | tuple) and all(isinstance(x, Tensor) for x in output):
        return list(output)
    return []


def _unexpected(output: Any, expected: str, task: str, names: str) -> UsageError:
    shapes = ", ".join(str(list(x.shape)) for x in outputs_of(output))
    return UsageError(
        f"the network returns {shapes or type(output).__name__}, and the task {task} of this data "
        f"set expects {expected}: check the {names} in model.args, and model.task"
    )


def _over_outputs(
    loss: Callable[[int, Tensor, Tensor], Tensor], outputs: Sequence[Tensor], labels: Tensor
) -> Tensor:
    """Returns the weighted mean of the losses of all outputs."""
    parts = [loss(i, scores, labels) * 0.5**i for i, scores in enumerate(outputs)]
    if len(parts) == 1:
        return parts[0]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / sum(0.5**i for i in range(len(parts)))


def _in_proportion(
    volume: tuple[int, ...], output: tuple[int, ...], labels: Tensor
) -> tuple[int, ...]:
    """Returns the extents of an output for the volumes of labels, by those for another volume."""
    extents = zip(labels.shape[1:], volume, output, strict=True)
    return tuple(-(-here * after // before) for here, before, after in extents)


def _resized(labels: Tensor, extents: tuple[int, ...]) -> Tensor:
    """Returns the nearest labels for the extents of an output."""
    if extents == tuple(labels.shape[1:]):
        return labels
    channel = labels[:, None].to(torch.get_default_dtype())
    return F.interpolate(channel, size=extents, mode="nearest")[:, 0].long()


def _values(output: Any, targets: Tensor) -> Tensor:
    """Returns the only output, of the targets' shape."""
    found = outputs_of(output)
    if len(found) != 1 or found[0].shape != targets.shape:
        raise _unexpected(output, f"[N, {targets.shape[1]}]", "regression", "outputs")
    return found[0]
