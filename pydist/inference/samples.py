"""Predicts samples that are NumPy files, or those of a data set, sample after sample."""

from __future__ import annotations

import codecs
import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydist.data import ShardDataset
from pydist.data.axes import without_flat
from pydist.data.numpy_file import SUFFIX, read_array
from pydist.data.publish import publishing
from pydist.errors import DataError
from pydist.inference.resident import Resident, labels_of


class Samples(Protocol):
    """Samples that are predicted.

    Attributes:
        names: of the samples, as the results name them.
        places: where they are, for errors.
        target_names: of the true values, if they are known.
    """

    names: Sequence[str]
    places: Sequence[str]
    target_names: Sequence[str]

    def read(self, index: int) -> npt.NDArray[np.generic]:
        """Returns a sample: [C, D, H, W], or [C, H, W] or [C, W] of an image or a line."""
        ...

    def true(self, index: int) -> Sequence[float]:
        """Returns the true values of a sample; raises `DataError` if they are not finite."""
        ...


class NumpySamples:
    """Samples that are `.npy` files, whose names they have; see `Samples`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self.names: Sequence[str] = [path.stem for path in paths]
        self.places: Sequence[str] = [str(path) for path in paths]
        self.target_names: Sequence[str] = ()
        for name, same in itertools.groupby(sorted(self.names)):
            if len(list(same)) > 1:
                raise DataError(f"two files have the name {name}{SUFFIX}: results have it too")

    def read(self, index: int) -> npt.NDArray[np.generic]:
        """Returns the array of a file; see `Samples`."""
        return read_array(self._paths[index])

    def true(self, index: int) -> Sequence[float]:
        """Returns nothing; see `Samples`."""
        return ()


class DatasetSamples:
    """Samples that a split of a data set has, with their numbers as names; see `Samples`."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self.names: Sequence[str] = [str(index) for index in range(len(dataset))]
        where = f"of the split {dataset.split!r} of {dataset.root}"
        self.places: Sequence[str] = [f"sample {name} {where}" for name in self.names]
        self.target_names: Sequence[str] = () if dataset.labeled else dataset.manifest.target_names

    def read(self, index: int) -> npt.NDArray[np.generic]:
        """Reads a sample as it is stored; see `Samples`."""
        shape = self._dataset.shape_of(index)
        stored = torch.empty(shape, dtype=self._dataset.stored_dtype)
        self._dataset.read_stored(index, None, stored)
        return stored.numpy().reshape(without_flat(shape, self._dataset.dims))

    def true(self, index: int) -> Sequence[float]:
        """Returns the targets of a sample; see `Samples`."""
        return self._dataset.target(index).tolist() if self.target_names else ()


def predict_samples(
    resident: Resident,
    samples: Samples,
    output: Path,
    progress: Callable[[int], None] = lambda done: None,
    on_bad: Callable[[DataError], None] | None = None,
) -> None:
    """Predicts samples, and writes the results. On the first rank; the others are in `follow`.

    Of a network for values or classes of samples the output is a CSV file with a row for each
    sample: its name, the true values if they are known, and the predicted values; or the class, and
    the probability of each. Of a network for the classes of voxels it is a folder, which exists,
    with a `.npy` file for each sample, [D, H, W] or of fewer dims.

    Args:
        resident: the network.
        samples: what is predicted.
        output: the file or folder.
        progress: called with the number of samples that are predicted.
        on_bad: called with the error of a sample that is left out; by default it is raised.

    Raises:
        DataError: a sample can't be read, or is none that the network accepts.
        DiskError: the output can't be written.
    """
    loaded = resident.loaded
    if loaded.kind == "segmentation":
        for index, scores in _outputs(resident, samples, progress, on_bad or _stop):
            labels = labels_of(scores)
            path = output / f"{samples.names[index]}{SUFFIX}"
            with publishing(path, labels.nbytes) as file:
                np.save(file, labels, allow_pickle=False)
        return
    known = [f"true {name}" for name in samples.target_names]
    # Opened first: a folder that can't be written is told before anything is computed.
    with publishing(output, 0) as file:
        table = csv.writer(codecs.getwriter("utf-8")(file))
        is_first = True
        for index, found in _outputs(resident, samples, progress, on_bad or _stop):
            try:
                true = samples.true(index)
            except DataError as error:
                (on_bad or _stop)(error)
                continue
            names, scores = loaded.names_of(found.numel()), found.double().flatten()
            if is_first:
                table.writerow(["sample", *known, *_columns(loaded.kind, names)])
                is_first = False
            values: list[Any] = scores.tolist()
            if loaded.kind == "classification":
                values = [names[int(scores.argmax())], *scores.softmax(0).tolist()]
            table.writerow([samples.names[index], *true, *values])


def _columns(kind: str, names: Sequence[str]) -> list[str]:
    """Returns the names of the columns of predicted values."""
    if kind == "classification":
        return ["class", *(f"probability {name}" for name in names)]
    return [f"predicted {name}" for name in names]


def _outputs(
    resident: Resident,
    samples: Samples,
    progress: Callable[[int], None],
    on_bad: Callable[[DataError], None],
) -> Iterator[tuple[int, Tensor]]:
    """Yields the number and the output of each sample, as many at a time as there are groups."""
    for first in range(0, len(samples.names), resident.groups):
        numbers = range(first, min(first + resident.groups, len(samples.names)))
        inputs: dict[int, Tensor] = {}
        for number in numbers:
            try:
                inputs[number] = resident.prepared(samples.read(number), samples.places[number])
            except DataError as error:
                on_bad(error)
        outputs = resident.predict(list(inputs.values())) if inputs else []
        for number, found in zip(inputs, outputs, strict=True):
            if found.isfinite().all():
                yield number, found
                continue
            on_bad(
                DataError(
                    f"{samples.places[number]}: the network's output is not finite: the sample has "
                    "extreme values, or training diverged"
                )
            )
        progress(numbers.stop)


def _stop(error: DataError) -> None:
    raise error
