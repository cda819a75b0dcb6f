"""The manifest of a data set: `dataset.json`, which describes the content of its files."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np

from pydist.data.publish import publish
from pydist.data.regular import require_regular
from pydist.errors import DataError
from pydist.parsing import parse_json

FILE_NAME = "dataset.json"
FORMAT = "pydist-dataset"
VERSION = 1

HDF5 = "hdf5"

Axes = Literal["CDHW", "DHWC"]


@dataclass(frozen=True)
class DataFile:
    """File that holds some of the samples.

    Attributes:
        path: relative to the manifest, with forward slashes.
        split: "train", "val", or another name.
        bytes: its size.
        crc32: checksum of all its bytes, 8 hexadecimal digits; empty if none was computed.
        offsets: start of each sample in the file's array, (depth, height, width) in voxels.
        means: mean of each sample over all its voxels and channels; empty if not known.
        extents: voxels of its samples along depth, height and width, if they differ from those of
            the data set.
    """

    path: str
    split: str
    bytes: int
    crc32: str
    offsets: tuple[tuple[int, int, int], ...]
    means: tuple[float, ...] = ()
    extents: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Intensity:
    """Statistics that a channel has over its foreground voxels in training samples.

    Foreground is what the label does not call background.

    Attributes:
        lower: 0.5th percentile.
        upper: 99.5th percentile.
        mean: mean.
        std: standard deviation.
    """

    lower: float
    upper: float
    mean: float
    std: float


@dataclass(frozen=True)
class Manifest:
    """Description that a data set has in its `dataset.json`.

    Attributes:
        sample_shape: (C, D, H, W) of one sample; the largest extents, where samples differ.
        axes: order of the axes in the files: "CDHW" channel first, "DHWC" channel last.
        dtype: NumPy's name of the stored type.
        files: the files, in the order that counts the samples.
        dataset: name of the array in a file with the samples.
        target: name of the array in a file with the values to predict, if there are any.
        target_names: names of these values.
        label: name of the array in a file with the class of each voxel, [D, H, W], if there is one.
        class_names: names of the classes, in the order of the labels; background comes first.
        channel_names: names of the channels.
        log1p_mean: mean of log(1 + x) over the training samples, per channel; empty if not known.
        log1p_std: its standard deviation.
        intensity: statistics of the labeled voxels, per channel; empty if not known.
        origin: how the data set was made.
        file_format: of the files, a name in `pydist.registry.FORMATS`.
    """

    sample_shape: tuple[int, int, int, int]
    axes: Axes
    dtype: str
    files: tuple[DataFile, ...]
    dataset: str = "full"
    target: str = "unitPar"
    target_names: tuple[str, ...] = ()
    label: str = ""
    class_names: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()
    log1p_mean: tuple[float, ...] = ()
    log1p_std: tuple[float, ...] = ()
    intensity: tuple[Intensity, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    file_format: str = HDF5

    @property
    def splits(self) -> dict[str, int]:
        """Number of samples that each split has."""
        counts: dict[str, int] = {}
        for file in self.files:
            counts[file.split] = counts.get(file.split, 0) + len(file.offsets)
        return counts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest: equal on two ranks if they see the same data set."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()

    @property
    def digest_of_files(self) -> str:
        """SHA-256 that covers the files' samples and checksums."""
        said = [(f.path, f.split, f.bytes, f.crc32, f.offsets, f.extents) for f in self.files]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def save(self, root: str | Path) -> None:
        """Writes `dataset.json` into `root`, atomically."""
        publish(Path(root) / FILE_NAME, self.dumps().encode())

    def dumps(self) -> str:
        """Returns the content of `dataset.json`, for `loads`."""
        record = {
            "format": FORMAT,
            "version": VERSION,
            # HDF5 is left out, to keep the digests of data sets that have no such key.
            **({} if self.file_format == HDF5 else {"file_format": self.file_format}),
            "sample_shape": self.sample_shape,
            "axes": self.axes,
            "dtype": self.dtype,
            "dataset": self.dataset,
            "target": self.target,
            "target_names": self.target_names,
            "label": self.label,
            "class_names": self.class_names,
            "channel_names": self.channel_names,
            "splits": self.splits,
            "log1p_mean": self.log1p_mean,
            "log1p_std": self.log1p_std,
            "intensity": [vars(channel) for channel in self.intensity],
            "origin": self.origin,
            "files": [vars(file) for file in self.files],
        }
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def load(cls, root: Path) -> Manifest:
        """Reads and checks the manifest in the folder `root`.

        Raises:
            DataError: it is missing, no manifest, of a later version, or inconsistent.
        """
        path = root / FILE_NAME
        try:
            if path.exists():
                require_regular(path)
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise DataError(_missing(root)) from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {error}") from error
        return cls.loads(text, str(path))

    @classmethod
    def loads(cls, text: str, source: str) -> Manifest:
        """Reads and checks the text of `dumps`; `source` names it in errors (see `load`)."""
        try:
            record = parse_json(text)
        except ValueError as error:
            raise DataError(f"{source}: not JSON: {error}") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise DataError(f'{source}: not a data set manifest ("format": "{FORMAT}" expected)')
        if record.get("version") != VERSION:
            raise DataError(
                f"{source}: version {record.get('version')!r}; this pydist reads version {VERSION}"
            )
        try:
            return cls._from_record(record)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise DataError(f"{source}: damaged: {type(error).__name__} {error}") from error

    @classmethod
    def _from_record(cls, record: Mapping[str, Any]) -> Manifest:
        channels, depth, height, width = (_positive(n) for n in record["sample_shape"])
        if record["axes"] not in get_args(Axes):
            raise ValueError(f"axes {record['axes']!r}")
        files = tuple(_data_file(entry) for entry in record["files"])
        paths = Counter(file.path for file in files)
        if len(paths) < len(files):
            raise ValueError(f"file {paths.most_common(1)[0][0]!r} is listed more than once")
        return cls(
            sample_shape=(channels, depth, height, width),
            axes=record["axes"],
            dtype=_dtype(record["dtype"]),
            files=files,
            dataset=_name(record["dataset"]),
            target=_name(record["target"]),
            target_names=_names(record["target_names"]),
            label=_name(record.get("label", "")),
            class_names=_names(record.get("class_names", ())),
            channel_names=_names(record["channel_names"]),
            log1p_mean=_numbers(record["log1p_mean"]),
            log1p_std=_numbers(record["log1p_std"]),
            intensity=tuple(_intensity(**entry) for entry in record.get("intensity", ())),
            origin=dict(record["origin"]),
            file_format=_name(record.get("file_format", HDF5)),
        )


def _missing(root: Path) -> str:
    if not root.is_dir():
        return (
            f"{root}: no such folder; `pydist data universes {root}` and `pydist data ct {root}` "
            "make synthetic data sets"
        )
    found = sorted(p.name for p in root.iterdir())[:5]
    return f"{root}: no {FILE_NAME} in it; it has {', '.join(found) or 'nothing'}"


def _data_file(entry: Mapping[str, Any]) -> DataFile:
    path = PurePosixPath(_name(entry["path"]))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"path {entry['path']!r} leads out of the data set's folder")
    offsets = tuple(_offset(o) for o in entry["offsets"])
    means = _numbers(entry["means"])
    if means and len(means) != len(offsets):
        raise ValueError(f"{path}: {len(means)} means for {len(offsets)} samples")
    extents = None
    if entry.get("extents") is not None:
        depth, height, width = (_positive(n) for n in entry["extents"])
        extents = depth, height, width
    return DataFile(
        str(path),
        str(entry["split"]),
        _integer("bytes", entry["bytes"], 0, 1 << 63),
        str(entry["crc32"]),
        offsets,
        means,
        extents,
    )


def _intensity(**values: Any) -> Intensity:
    found = Intensity(**{name: float(value) for name, value in values.items()})
    if not all(map(math.isfinite, vars(found).values())) or found.lower > found.upper:
        raise ValueError(f"statistics {found}")
    return found


def _offset(values: Sequence[Any]) -> tuple[int, int, int]:
    depth, height, width = (_integer("offset", v, 0, 1 << 31) for v in values)
    return depth, height, width


def _positive(value: Any) -> int:
    return _integer("extent", value, 1, 1 << 31)


def _integer(what: str, value: Any, least: int, end: int) -> int:
    if type(value) is not int or not least <= value < end:  # True is an int too
        raise ValueError(f"{what} {value!r}")
    return value


def _name(value: Any) -> str:
    """Returns a checked name of a file, or of an array in one."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"name {value!r}")
    os.fsencode(value)  # a ValueError where no file can have that name
    return value


def _dtype(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"dtype {value!r}")
    found = np.dtype(value)
    if found.kind not in "biuf" or found.itemsize > 8:
        raise ValueError(f"dtype {value!r}")
    return value


def _names(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(v) for v in values)


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    numbers = tuple(float(v) for v in values)
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"statistics {numbers}")
    return numbers
