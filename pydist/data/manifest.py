"""The manifest of a data set: `dataset.json`, which describes the content of its files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationError

from pydist.data.axes import Axes, spatial_dims
from pydist.data.data_file import DataFile, checked_path
from pydist.data.file_table import FileTable
from pydist.data.publish import publish
from pydist.data.regular import require_regular
from pydist.errors import DataError
from pydist.parsing import parse_json

__all__ = ["FILE_NAME", "Axes", "DataFile", "Intensity", "Manifest"]

FILE_NAME = "dataset.json"
FORMAT = "pydist-dataset"
VERSION = 2
_INLINE = 1
"""Version whose files are objects of the JSON text."""
_MOST_BYTES = 1 << 30
"""Bytes of the largest manifest: version 1 has about 200 for each file."""
_TABLE = re.compile(r"dataset-[0-9a-f]{16}\.index")
"""Name of the folder with the table of files, by its content."""

HDF5 = "hdf5"


def _name(value: Any) -> str:
    """Returns a checked name of a file, or of an array in one."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("a text without NUL is expected")
    os.fsencode(value)  # a ValueError where no file can have that name
    return value


def _dtype(value: Any) -> str:
    """Returns NumPy's name of a type, for spellings such as "<f4" too."""
    try:
        found = np.dtype(value) if isinstance(value, str) else None
    except TypeError:
        found = None
    if found is None or found.kind not in "biuf" or found.itemsize > 8:
        raise ValueError("a type of numbers of up to 8 bytes is expected")
    return found.name


def _ordered(value: Intensity) -> Intensity:
    if value.lower > value.upper:
        raise ValueError("lower is above upper")
    return value


_Name = Annotated[str, PlainValidator(_name)]
_Extent = Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
_Offset = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


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

    lower: _Finite
    upper: _Finite
    mean: _Finite
    std: _Finite


@dataclass(frozen=True)
class _InlineFile:
    """File that a manifest of version 1 lists as an object."""

    path: Annotated[_Name, AfterValidator(checked_path)]
    split: str
    bytes: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
    crc32: str
    offsets: tuple[tuple[_Offset, _Offset, _Offset], ...]
    means: tuple[_Finite, ...]
    extents: tuple[_Extent, _Extent, _Extent] | None = None


def _table(value: Any) -> FileTable:
    """Returns the table of the files, which version 1 lists."""
    if isinstance(value, FileTable):
        return value
    records = _inline().validate_python(value)
    paths = Counter(record.path for record in records)
    if len(paths) < len(records):
        raise ValueError(f"file {paths.most_common(1)[0][0]!r} is listed more than once")
    return FileTable.of(
        DataFile(r.path, r.split, r.bytes, r.crc32, r.offsets, r.means, r.extents) for r in records
    )


@dataclass(frozen=True)
class Manifest:
    """Description that a data set has in its `dataset.json`.

    Attributes:
        sample_shape: (C, D, H, W) of one sample; the largest extents, where samples differ.
        axes: order of the axes in the files: "CDHW" channel first, "DHWC" channel last; of images
            "CHW" or "HWC", of lines "CW" or "WC", whose other extents in `sample_shape` are 1.
        dtype: NumPy's name of the stored type.
        files: the files, in the order that counts the samples; kept as a `FileTable`.
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

    sample_shape: tuple[_Extent, _Extent, _Extent, _Extent]
    axes: Axes
    dtype: Annotated[str, PlainValidator(_dtype)]
    files: Annotated[Sequence[DataFile], PlainValidator(_table)]
    dataset: _Name = "full"
    target: _Name = "unitPar"
    target_names: tuple[str, ...] = ()
    label: _Name = ""
    class_names: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()
    log1p_mean: tuple[_Finite, ...] = ()
    log1p_std: tuple[_Finite, ...] = ()
    intensity: tuple[Annotated[Intensity, AfterValidator(_ordered)], ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    file_format: _Name = HDF5

    def __post_init__(self) -> None:
        if not isinstance(self.files, FileTable):
            object.__setattr__(self, "files", FileTable.of(self.files))
        flat = self.sample_shape[1 : 4 - self.dims]
        if any(n != 1 for n in flat):
            raise ValueError(f"sample_shape {self.sample_shape} with axes {self.axes!r}")

    @property
    def dims(self) -> int:
        """Number of spatial dims that networks get: 2 for images [N, C, H, W]."""
        return spatial_dims(self.axes)

    @property
    def table(self) -> FileTable:
        """Table that holds the files as columns."""
        assert isinstance(self.files, FileTable)
        return self.files

    @property
    def splits(self) -> dict[str, int]:
        """Number of samples that each split has."""
        return self.table.splits

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest: equal on two ranks if they see the same data set."""
        return hashlib.sha256(f"{self.dumps()}{self.table.digest}".encode()).hexdigest()

    def save(self, root: str | Path) -> None:
        """Writes `dataset.json` and the table of files beside it into `root`, atomically.

        The table is a folder whose name is part of `dataset.json`: a reader sees the old manifest
        with the old table, or the new one with the new table. The old table stays until the next
        save, for a reader that has read the old `dataset.json`; older ones are removed.

        Raises:
            DiskError: the disk is full, or the folder can't be written.
        """
        folder = Path(root)
        name = f"dataset-{self.table.digest[:16]}.index"
        try:
            FileTable.open(folder / name, list(self.splits))
        except DataError:  # there is none, or a damaged one; a good one is never replaced
            self.table.save(folder / name)
        record = {**self._record(), "version": VERSION, "splits": self.splits, "files": name}
        kept = {name, _table_of(folder)}
        publish(folder / FILE_NAME, _text(record).encode())
        for other in folder.glob("dataset-*.index"):
            if other.name not in kept and _TABLE.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)

    def dumps(self) -> str:
        """Returns the description without its files, for `loads`."""
        return _text({**self._record(), "version": _INLINE, "splits": {}, "files": []})

    def _record(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": 0,
            # HDF5 is left out, as in older descriptions, with which checkpoints compare theirs.
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
            "splits": {},
            "log1p_mean": self.log1p_mean,
            "log1p_std": self.log1p_std,
            "intensity": [asdict(channel) for channel in self.intensity],
            "origin": self.origin,
        }

    @classmethod
    def load(cls, root: str | Path) -> Manifest:
        """Reads and checks the manifest in the folder `root`.

        The table of files is mapped: all processes of a machine share its memory, and it is read
        from the folder once.

        Raises:
            DataError: it is missing, no manifest, of a later version, or inconsistent.
        """
        root = Path(root)
        return cls.loads(_read(root), str(root / FILE_NAME), root)

    @classmethod
    def loads(cls, text: str, source: str, root: Path | None = None) -> Manifest:
        """Reads and checks the text of a manifest.

        Args:
            text: of `dumps`, or of `dataset.json`.
            source: names it in errors.
            root: folder with the table of files, if the text names one.

        Raises:
            DataError: see `load`.
        """
        try:
            record = parse_json(text)
        except ValueError as error:
            raise DataError(f"{source}: not JSON: {error}") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise DataError(f'{source}: not a data set manifest ("format": "{FORMAT}" expected)')
        version = record.get("version")
        if version not in (_INLINE, VERSION):
            raise DataError(
                f"{source}: version {version!r}; this pydist reads versions {_INLINE} and {VERSION}"
            )
        if version == VERSION:
            record = {**record, "files": _opened(record, source, root)}
        try:
            return _checked().validate_python(record)
        except ValidationError as error:
            raise DataError(f"{source}: damaged: {_in_one_line(error)}") from None
        except ValueError as error:
            raise DataError(f"{source}: damaged: {error}") from error


def _read(root: Path) -> str:
    """Returns the text of the manifest in a folder; raises `DataError`."""
    path = root / FILE_NAME
    try:
        if path.exists() and (size := require_regular(path).st_size) > _MOST_BYTES:
            raise DataError(f"{path}: {size} bytes; {_MOST_BYTES} are possible")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(_missing(root)) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error


def _table_of(root: Path) -> str:
    """Returns the name of the table that a folder's manifest names; empty for none."""
    try:
        record = parse_json(_read(root))
    except (DataError, ValueError):
        return ""
    name = record.get("files") if isinstance(record, dict) else None
    return name if isinstance(name, str) else ""


def _opened(record: Mapping[str, Any], source: str, root: Path | None) -> FileTable:
    """Opens the table of files that a manifest names."""
    name, splits = record.get("files"), record.get("splits")
    if root is None or not (isinstance(name, str) and _TABLE.fullmatch(name)):
        raise DataError(
            f"{source}: damaged: files = {name!r}: a folder dataset-....index beside it"
        )
    if not isinstance(splits, dict):
        raise DataError(f"{source}: damaged: splits = {splits!r}: samples of each split")
    return FileTable.open(root / name, list(splits))


# Made at the first use: validators take time to be built, and not every process reads a manifest.
@cache
def _checked() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@cache
def _inline() -> TypeAdapter[list[_InlineFile]]:
    return TypeAdapter(list[_InlineFile])


def _in_one_line(error: ValidationError) -> str:
    """Describes the first fault: where it is, what it is, and what is possible."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    given = first["input"]
    if first["type"] == "missing":
        return f"no entry {place!r}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place} = {reprlib.repr(given)}: {message[:1].lower()}{message[1:]}"


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1) + "\n"


def _missing(root: Path) -> str:
    if not root.is_dir():
        return (
            f"{root}: no such folder; `pydist data universes {root}` and `pydist data ct {root}` "
            "make synthetic data sets"
        )
    found = sorted(p.name for p in root.iterdir())[:5]
    return f"{root}: no {FILE_NAME} in it; it has {', '.join(found) or 'nothing'}"
