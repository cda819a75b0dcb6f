"""Makes manifests for existing HDF5 files, such as the public CosmoFlow set, and checks files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from pydist.data.made import checksum_of_file
from pydist.data.manifest import Axes, DataFile, Manifest
from pydist.data.regular import require_regular
from pydist.data.safe_open import SafeFile, safe_open
from pydist.errors import DataError, UsageError
from pydist.registry import FORMATS

SUFFIXES = (".hdf5", ".h5")
COSMOFLOW_TARGETS = ("Omega_m", "sigma_8", "N_spec", "H_0")

Progress = Callable[[int, int, str], None]
"""Called with (files done, files in total, the latest file)."""


@dataclass(frozen=True)
class IndexOptions:
    """Options that say how a data set is made of existing files.

    Attributes:
        width: voxels along a side of a sample; each file is cut into as many as fit. By default a
            sample is a full file.
        dataset: name of the 4-D dataset, channel first or last.
        target: name of the 1-D dataset to predict.
        validation: fraction of the files for the split "val", the last by name. Files in folders
            called train, val or test always belong to that split.
        statistics: read all data once, for normalize="mean" and "standardize".
        checksums: read all files once, for `verify_dataset`.
    """

    width: int | None = None
    dataset: str = "full"
    target: str = "unitPar"
    validation: float = 0.1
    statistics: bool = True
    checksums: bool = True


def index_folder(
    root: str | Path, options: IndexOptions | None = None, progress: Progress | None = None
) -> Manifest:
    """Describes the HDF5 files below `root` in a manifest, which `Manifest.save` can write.

    All files must have the same type and number of channels, and all samples the same shape.

    Raises:
        DataError: there are no files, or one of them does not fit or is damaged.
        UsageError: an option is out of range.
    """
    options = options or IndexOptions()
    if not 0 <= options.validation < 1 or (options.width is not None and options.width < 1):
        raise UsageError(
            f"validation={options.validation}, width={options.width}: a fraction in [0, 1) and at "
            "least one voxel"
        )
    folder = Path(root)
    paths = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not paths:
        raise DataError(f"{folder}: no files ending in {' or '.join(SUFFIXES)}")
    splits = _splits(folder, paths, options.validation)
    total = _Totals()
    files: list[DataFile] = []
    kind: _Kind | None = None
    for done, (path, split) in enumerate(zip(paths, splits, strict=True), 1):
        with safe_open(path) as file:
            volume = _volume(file, options)
            kind = kind or volume.kind
            if volume.kind != kind:
                raise DataError(f"{path} holds {volume.kind}, but {paths[0]} holds {kind}")
            files.append(_entry(path, split, volume, options, root=folder, total=total))
            if change := file.change():
                raise DataError(change)
        if progress:
            progress(done, len(paths), path.name)
    assert kind is not None
    mean, std = total.log1p()
    return Manifest(
        sample_shape=kind.sample_shape,
        axes=kind.axes,
        dtype=kind.dtype,
        files=tuple(files),
        dataset=options.dataset,
        target=options.target,
        target_names=kind.target_names,
        log1p_mean=mean,
        log1p_std=std,
        origin={"kind": "indexed files", "options": vars(options)},
    )


def verify_dataset(root: str | Path, progress: Progress | None = None) -> list[str]:
    """Reads every file of a data set and compares size and checksum with the manifest.

    Contiguous HDF5 has no checksums of its own: without this, a flipped bit goes unnoticed. For
    formats whose files are folders, only the existence of the folders is checked.

    Returns:
        One line for each file that is missing or differs; empty if there is none.

    Raises:
        DataError: the manifest itself is missing or damaged.
        UsageError: it names a format that is not installed.
    """
    folder = Path(root)
    manifest = Manifest.load(folder)
    FORMATS.get(manifest.file_format)
    faults = []
    for done, entry in enumerate(manifest.files, 1):
        path = folder / entry.path
        if path.is_dir() and not entry.crc32:
            continue
        try:
            require_regular(path)
            size, checksum = checksum_of_file(path)
        except DataError as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
        else:
            if size != entry.bytes:
                faults.append(f"{path}: {size} bytes, the manifest says {entry.bytes}")
            elif entry.crc32 and checksum != entry.crc32:
                faults.append(f"{path}: checksum {checksum}, the manifest says {entry.crc32}")
        if progress:
            progress(done, len(manifest.files), path.name)
    return faults


@dataclass(frozen=True)
class _Kind:
    """The properties that all files of a data set share."""

    axes: Axes
    dtype: str
    sample_shape: tuple[int, int, int, int]
    target_names: tuple[str, ...]


@dataclass(frozen=True)
class _Volume:
    """Array that one file holds, and its extents in voxels."""

    array: h5py.Dataset
    extents: tuple[int, ...]
    kind: _Kind

    def read(self, offset: tuple[int, int, int]) -> npt.NDArray[Any]:
        """Reads one sample, channel first."""
        window: tuple[slice, ...] = tuple(
            slice(o, o + n) for o, n in zip(offset, self.kind.sample_shape[1:], strict=True)
        )
        last = self.kind.axes == "DHWC"
        window = (*window, slice(None)) if last else (slice(None), *window)
        sample = np.asarray(self.array[window])
        return np.moveaxis(sample, -1, 0) if last else sample


class _Totals:
    """Sums of log(1 + x) that are taken over the training samples, per channel."""

    def __init__(self) -> None:
        self.voxels = 0
        self.sums: Any = 0.0
        self.squares: Any = 0.0

    def add(self, sample: npt.NDArray[Any]) -> None:
        logs = np.log1p(sample.reshape(sample.shape[0], -1), dtype=np.float64)
        self.voxels += logs.shape[1]
        self.sums = self.sums + logs.sum(1)
        self.squares = self.squares + (logs * logs).sum(1)

    def log1p(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns mean and standard deviation per channel; empty without samples."""
        if not self.voxels:
            return (), ()
        mean = self.sums / self.voxels
        std = np.sqrt(np.maximum(self.squares / self.voxels - mean**2, 0))
        return tuple(map(float, mean)), tuple(map(float, std))


def _splits(root: Path, paths: list[Path], validation: float) -> list[str]:
    """Returns the split of each file: that of its folder, else the last files are "val"."""
    splits = []
    first = len(paths) - round(len(paths) * validation)
    for i, path in enumerate(paths):
        folders = path.relative_to(root).parts[:-1]
        named = [f for f in folders if f in ("train", "val", "test")]
        splits.append(named[-1] if named else "train" if i < first else "val")
    return splits


def _volume(file: SafeFile, options: IndexOptions) -> _Volume:
    array, target = file.dataset(options.dataset), file.dataset(options.target)
    shape = array.shape
    if array.ndim != 4 or target.ndim != 1:
        raise DataError(
            f"{file.path}: {options.dataset!r} has the shape {shape}, {options.target!r} "
            f"{target.shape}; 4-D and 1-D are needed"
        )
    last = shape[3] < shape[0]
    extents, channels = (shape[:3], shape[3]) if last else (shape[1:], shape[0])
    width = options.width
    if width is not None and width > min(extents):
        raise DataError(f"{file.path}: {options.dataset!r}, {extents} voxels, fits no {width}^3")
    depth, height, breadth = extents if width is None else (width,) * 3
    count = target.shape[0]
    names = tuple(f"target {i}" for i in range(count))
    kind = _Kind(
        "DHWC" if last else "CDHW",
        array.dtype.name,
        (channels, depth, height, breadth),
        COSMOFLOW_TARGETS if options.target == "unitPar" and count == 4 else names,
    )
    return _Volume(array, extents, kind)


def _entry(
    path: Path, split: str, volume: _Volume, options: IndexOptions, *, root: Path, total: _Totals
) -> DataFile:
    offsets = tuple(_corners(volume))
    means = []
    for offset in offsets if options.statistics else ():
        sample = volume.read(offset)
        means.append(float(sample.mean(dtype=np.float64)))
        if not np.isfinite(means[-1]):
            raise DataError(f"{path}: {options.dataset!r} has NaN or infinity in {offset}")
        if split == "train":
            total.add(sample)
    size, checksum = checksum_of_file(path) if options.checksums else (path.stat().st_size, "")
    name = path.relative_to(root).as_posix()
    return DataFile(name, split, size, checksum, offsets, tuple(means))


def _corners(volume: _Volume) -> Iterator[tuple[int, int, int]]:
    steps = zip(volume.extents, volume.kind.sample_shape[1:], strict=True)
    depth, height, width = (range(0, n - w + 1, w) for n, w in steps)
    yield from itertools.product(depth, height, width)
