"""Loads the network of a checkpoint with what prediction needs besides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pydist.data import Manifest
from pydist.data.medical.collection import as_stored
from pydist.data.normalize import Normalizer
from pydist.errors import CheckpointError, DataError
from pydist.interop import ArrayLike, as_tensor
from pydist.train.metadata import load_trained
from pydist.train.tasks import Task


@dataclass(frozen=True)
class Loaded:
    """Network that was loaded from a checkpoint.

    Attributes:
        network: with the trained weights, in evaluation mode, on the host.
        task: that it was trained for.
        manifest: of the training data, without files.
        normalizer: of its input, float32.
        name: of the network, for texts.
    """

    network: nn.Module
    task: Task
    manifest: Manifest
    normalizer: Normalizer
    name: str

    @property
    def kind(self) -> str:
        """What is predicted: "segmentation", "regression" or "classification"."""
        if self.task.multiple is not None:
            return "segmentation"
        return "classification" if getattr(self.task, "predicts_classes", False) else "regression"

    def names_of(self, outputs: int) -> Sequence[str]:
        """Returns the names of the values that the network predicts for a sample.

        A task of the user's own may predict others than the data set has; they are numbered.
        """
        classes = self.kind == "classification"
        names = self.manifest.class_names if classes else self.manifest.target_names
        return names if len(names) == outputs else [str(number) for number in range(outputs)]

    def stored(self, image: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.generic]:
        """Checks an image's channels and converts it to the dtype of the stored training data.

        Raises:
            DataError: another number of dims or channels, or values that do not fit; the message
                begins with `name`.
        """
        channels, dims = self.manifest.sample_shape[0], self.manifest.dims
        if image.ndim != 1 + dims or image.shape[0] != channels:
            possible = ", ".join((str(channels), *"DHW"[-dims:]))
            raise DataError(f"{name}: the shape {image.shape}; the network accepts [{possible}]")
        advice = ", as which training data were stored"
        return as_stored(image, self.manifest.dtype, name, advice)


def load_network(checkpoint: str | Path, factory: str = "", task: str = "") -> Loaded:
    """Loads the network of a checkpoint.

    Args:
        checkpoint: see `pydist.train.metadata.load_trained`.
        factory: of a network that is not pydist's own, such as "nets.py:make"; it runs only if
            it is named, as a checkpoint may be a stranger's.
        task: the same for a task that is not pydist's own.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        UsageError: another factory or task.
    """
    metadata, weights = load_trained(checkpoint)
    trained_for = metadata.task(factory, task)
    network = trained_for.network(metadata.manifest)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = shorten(str(error), 200)  # the error may name every parameter
        raise CheckpointError(f"{checkpoint}: its weights do not fit: {reason}") from error
    data = metadata.config.data
    normalizer = Normalizer(data.normalize, metadata.manifest, "float32", data.window)
    name = metadata.config.model.name
    return Loaded(network.eval(), trained_for, metadata.manifest, normalizer, name)


def values_of(image: ArrayLike, name: str) -> npt.NDArray[np.generic]:
    """Returns an image as an array of real numbers in host memory; `name` is for errors."""
    tensor = as_tensor(image)
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise DataError(f"{name}: a tensor of kind {kind}; real numbers in dense memory are needed")
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy has none
    return tensor.numpy(force=True)
