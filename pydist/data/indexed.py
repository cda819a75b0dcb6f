"""Describes one existing file for the manifest of a data set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from pydist.data.axes import Axes, as_volume, channels_last, file_order
from pydist.data.formats import StoredArray, StoredFile
from pydist.data.isolated import kept_process
from pydist.data.log1p import Log1pSums
from pydist.data.made import checksum_of_file, read_entries, state_of
from pydist.data.manifest import DataFile
from pydist.data.open_files import in_one_line
from pydist.data.trust import FileTrust
from pydist.errors import DataError
from pydist.registry import FORMATS

COSMOFLOW_TARGETS = ("Omega_m", "sigma_8", "N_spec", "H_0")
_COSMOFLOW_NAMES = ("unitPar", "y")
"""Names of the targets' array in the public files, and in MLPerf's."""

SLAB_BYTES = 1 << 26
"""Bytes of the part of a sample that is read at a time."""


@dataclass(frozen=True)
class FileTask:
    """A file that is to be described.

    Attributes:
        root: the data set's folder.
        path: the file.
        file_format: its format.
        split: its split.
        width: voxels along a side of a sample; None for full files.
        dataset: name of the samples' array.
        target: name of the targets' array.
        statistics: whether all voxels are read, for means and sums.
        checksums: whether all bytes are read, for a checksum.
        classes: number of classes, if the target is the number of one; else 0.
        trust: how far the file is trusted.
    """

    root: Path
    path: Path
    file_format: str
    split: str
    width: int | None
    dataset: str
    target: str
    statistics: bool
    checksums: bool
    classes: int = 0
    trust: FileTrust = field(default_factory=FileTrust)

    @property
    def name(self) -> str:
        """Path that is relative to the data set's folder."""
        return self.path.relative_to(self.root).as_posix()

    @property
    def recipe(self) -> list[Any]:
        """What the result depends on: the options, and the file's size and time."""
        others = ("root", "path", "trust")
        options = [value for name, value in asdict(self).items() if name not in others]
        return [*options, *state_of(self.path, self.trust.allow_roots)]


@dataclass(frozen=True)
class Kind:
    """The properties that all files of a data set share."""

    axes: Axes
    dtype: str
    sample_shape: tuple[int, int, int, int]
    target_names: tuple[str, ...]

    def __str__(self) -> str:
        """Returns the properties in words, for errors."""
        shape = " × ".join(map(str, self.sample_shape))
        return (
            f"{self.dtype} samples of {shape} (channels, depth, height, width) "
            f"with the axes {self.axes}, targets: {len(self.target_names)}"
        )


@dataclass(frozen=True)
class Indexed:
    """Description that `index_file` makes of one file.

    Attributes:
        kind: what it has in common with the other files.
        file: its entry in the manifest.
        logs: what it adds to the statistics of the training set.
    """

    kind: Kind
    file: DataFile
    logs: Log1pSums

    @classmethod
    def of(cls, record: dict[str, Any]) -> Indexed:
        """Returns the description from the record that `asdict` has made.

        Raises:
            ValueError: it is no such record.
        """
        return _adapter().validate_python(record)


@cache
def _adapter() -> TypeAdapter[Indexed]:
    return TypeAdapter(Indexed)


def index_file(task: FileTask) -> Indexed:
    """Reads and describes one file.

    Raises:
        DataError: it is damaged, or has no such arrays; or a link leads out of the data set.
    """
    kind: type[StoredFile] = FORMATS.get(task.file_format)
    path, roots = task.trust.path(task.root, task.name), task.trust.allow_roots
    with in_one_line(kind, path):
        if task.trust.untrusted:
            file: StoredFile = kept_process(task.file_format, roots).open(path)
        else:
            file = kind.open(path, roots)
        try:
            found = _described(task, file)
            if change := file.change():
                raise DataError(change)
        except file.errors as error:
            if change := file.change():  # the reason
                raise DataError(change) from error
            raise
        finally:
            file.close()
    return found


def _described(task: FileTask, file: StoredFile) -> Indexed:
    array = file.dataset(task.dataset)
    kind, extents = _kind(task, file, array)
    offsets = tuple(_corners(extents, kind.sample_shape[1:]))
    means = []
    total = Log1pSums.empty(kind.sample_shape[0])
    for offset in offsets if task.statistics else ():
        sums = 0.0
        for slab in slabs(file, array, kind.axes, offset, kind.sample_shape[1:]):
            sums += float(slab.sum(dtype=np.float64))
            if task.split == "train":
                total.add(slab)
        means.append(sums / np.prod(kind.sample_shape, dtype=np.float64).item())
        if not np.isfinite(means[-1]):
            raise DataError(f"{task.path}: {task.dataset!r} has NaN or infinity in {offset}")
    roots = task.trust.allow_roots
    size, checksum = _size(task.path, roots), ""
    if task.checksums:
        size, checksum = checksum_of_file(task.path, allow_roots=roots)
    entry = DataFile(task.name, task.split, size, checksum, offsets, tuple(means))
    return Indexed(kind, entry, total)


def slabs(
    file: StoredFile,
    array: StoredArray,
    axes: Axes,
    offset: Sequence[int],
    extents: Sequence[int],
) -> Iterator[npt.NDArray[Any]]:
    """Yields a box of an array in parts along the depth, channel first.

    Args:
        file: the open file.
        array: of samples.
        axes: order of its axes.
        offset: first voxel (D, H, W).
        extents: voxels (D, H, W).
    """
    depth, height, width = (slice(o, o + n) for o, n in zip(offset, extents, strict=True))
    channels = array.shape[-1 if channels_last(axes) else 0]
    plane = max(1, channels * extents[1] * extents[2] * array.dtype.itemsize)
    step = max(1, SLAB_BYTES // plane)
    for start in range(depth.start, depth.stop, step):
        part = slice(start, min(start + step, depth.stop)), height, width
        found = file.read(array, file_order(axes, (slice(0, channels), *part)))
        yield as_volume(axes, found)


def _kind(task: FileTask, file: StoredFile, array: StoredArray) -> tuple[Kind, tuple[int, ...]]:
    """Returns the kind of a file, and the extents (D, H, W) of its array."""
    target = file.dataset(task.target)
    shape = array.shape
    if not 2 <= array.ndim <= 4 or target.ndim != 1:
        raise DataError(
            f"{task.path}: {task.dataset!r} has the shape {shape}, {task.target!r} "
            f"{target.shape}; 4-D (3-D of images, 2-D of lines) and 1-D are needed"
        )
    last = shape[-1] < shape[0]
    dims = array.ndim - 1
    extents, channels = (shape[:-1], shape[-1]) if last else (shape[1:], shape[0])
    if dims < 3 and channels >= min(extents):
        raise DataError(
            f"{task.path}: {task.dataset!r} has the shape {shape}, which may be a volume without "
            "channels: images and lines need fewer channels than voxels along each dim"
        )
    extents = (*[1] * (3 - dims), *extents)
    width = task.width
    if min(shape) < 1 or (width is not None and width > min(extents[3 - dims :])):
        fits = "has no voxels" if width is None else f"fits no {width}^3"
        raise DataError(f"{task.path}: {task.dataset!r}, {extents} voxels, {fits}")
    depth, height, breadth = extents if width is None else (*[1] * (3 - dims), *[width] * dims)
    count = target.shape[0]
    public = task.target in _COSMOFLOW_NAMES and count == len(COSMOFLOW_TARGETS)
    names = COSMOFLOW_TARGETS if public else tuple(f"target {i}" for i in range(count))
    values = file.read(target, ())
    check_target(task.path, task.target, values)
    if task.classes:
        _check_class(task, values)
        names = ("class",)
    letters = "DHW"[3 - dims :]
    axes = cast("Axes", f"{letters}C" if last else f"C{letters}")
    sample = (channels, depth, height, breadth)
    return Kind(axes, array.dtype.name, sample, names), extents


def check_target(path: Path, name: str, values: npt.NDArray[Any]) -> None:
    """Raises `DataError` unless the values to predict are finite numbers."""
    if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
        raise DataError(f"{path}: {name!r} is {values.tolist()}; finite numbers are needed")


def _check_class(task: FileTask, values: npt.NDArray[Any]) -> None:
    """Raises `DataError` unless a target is the number of a class."""
    found = values.tolist()
    if len(found) != 1 or found[0] not in range(task.classes):
        raise DataError(
            f"{task.path}: {task.target!r} is {found}; with class_names it is one number from 0 to "
            f"{task.classes - 1}"
        )


def _corners(extents: Sequence[int], sample: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    steps = zip(extents, sample, strict=True)
    depth, height, width = (range(0, n - w + 1, w) for n, w in steps)
    yield from itertools.product(depth, height, width)


def _size(path: Path, allow_roots: Sequence[Path]) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(p.stat().st_size for p in read_entries(path, allow_roots) if p.is_file())
