"""The files and samples of a data set as columns, which are mapped from a pack."""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from pydist._loader import native
from pydist.data.data_file import CHECKSUMS, DataFile, checked_path, parsed_checksum
from pydist.data.publish import publish_folder
from pydist.errors import DataError

_FILE = np.dtype(
    [
        ("path_end", "<u8"),  # in the text of all paths; a path begins where the last one ends
        ("sample_end", "<u8"),  # in the table of samples, likewise
        ("bytes", "<u8"),
        ("extents", "<u4", 3),  # zeros: those of the data set
        ("crc", "<u4"),
        ("checksum", "<u2"),  # which of `CHECKSUMS`
        ("split", "<u2"),  # which of the manifest's splits
    ]
)
_SAMPLE = np.dtype([("mean", "<f8"), ("offset", "<u4", 3)])
"""The mean is NaN where it is not known."""
_COLUMNS = {b"files": _FILE, b"paths": np.dtype("u1"), b"samples": _SAMPLE}
"""Names of the packed files in the order of an index, and their types."""

_LARGEST_EXTENT = 1 << 31
_LARGEST_FILE = 1 << 63
_RECENT = 1024
"""Entries that are kept as objects."""

Column = npt.NDArray[Any]


class Sample(NamedTuple):
    """One sample: its file, where it begins there, and its mean, 1 if that is not known."""

    file: DataFile
    offset: tuple[int, int, int]
    mean: float


class FileTable(Sequence[DataFile]):
    """Sequence that keeps a data set's files in three arrays: of files, of samples, and of paths.

    An array is mapped where the table was opened, so that all processes of a machine share it, and
    it is read once. Items are made when they are asked for, and the latest ones are kept.

    Args:
        files: of type `_FILE`.
        paths: the bytes of all paths.
        samples: of type `_SAMPLE`.
        splits: names of the splits.
        folder: the folder that `files`, `paths` and `samples` are mapped from.
    """

    def __init__(
        self,
        files: Column,
        paths: Column,
        samples: Column,
        splits: Sequence[str],
        folder: Path | None = None,
    ) -> None:
        self._files, self._paths, self._samples = files, paths, samples
        self._splits = tuple(splits)
        self._folder = folder
        self._recent: dict[int, DataFile] = {}
        self._recent_samples: dict[int, Sample] = {}

    @classmethod
    def of(cls, files: Iterable[DataFile]) -> FileTable:
        """Makes the table of files; raises `ValueError` for an impossible one."""
        splits: dict[str, int] = {}
        rows, paths = [], bytearray()
        means: list[float] = []
        offsets: list[tuple[int, int, int]] = []
        for file in files:
            paths += os.fsencode(file.path)
            offsets += file.offsets
            means += file.means or (math.nan,) * len(file.offsets)
            if len(means) != len(offsets):
                count = len(file.means), len(file.offsets)
                raise ValueError("{}: {} means for {} samples".format(file.path, *count))
            kind, crc = parsed_checksum(file.checksum)
            split = splits.setdefault(file.split, len(splits))
            extents = file.extents or (0, 0, 0)
            rows.append((len(paths), len(offsets), file.bytes, extents, crc, kind, split))
        samples = np.zeros(len(offsets), _SAMPLE)
        samples["mean"] = means
        samples["offset"] = np.array(offsets, "<u4").reshape(-1, 3)
        table = np.array(rows, _FILE)
        return cls(table, np.frombuffer(bytes(paths), "u1"), samples, tuple(splits))

    @classmethod
    def open(cls, folder: Path, splits: Sequence[str]) -> FileTable:
        """Maps the table that `save` has written, and compares it with its checksums.

        Raises:
            DataError: it is missing or damaged.
        """
        pack = native.PackFolder(os.fsencode(folder))
        pack.check_index()
        mapped: dict[int, Column] = {}
        columns: dict[bytes, Column] = {}
        for name, dtype in _COLUMNS.items():
            number = pack.find(name)
            entry = None if number is None else pack.entry(number)
            if entry is None or entry.codec != "raw" or entry.size % dtype.itemsize:
                raise DataError(f"{folder}: damaged: no table of {name.decode()}")
            pack.check_file(entry.number)
            if entry.partition not in mapped:
                file = folder / native.partition_name(entry.partition)
                mapped[entry.partition] = np.memmap(file, np.uint8, "r")
            part = mapped[entry.partition][entry.offset : entry.offset + entry.size]
            columns[name] = np.asarray(part).view(dtype)
        table = cls(columns[b"files"], columns[b"paths"], columns[b"samples"], splits, folder)
        if fault := table.fault():
            raise DataError(f"{folder}: damaged: {fault}")
        return table

    def save(self, folder: Path) -> None:
        """Writes the table into `folder`, atomically; equal tables have equal bytes.

        Raises:
            DiskError: the disk is full, or the folder can't be written.
        """

        def fill(temporary: Path) -> None:
            identity = bytes.fromhex(self.digest)[:16]
            partition = os.fsencode(temporary / native.partition_name(0))
            writer = native.PartitionWriter(partition, 0, identity)
            index = native.IndexWriter(0o755, 0)
            for name, column in zip(_COLUMNS, self._columns, strict=True):
                number = index.add(0, name, False, 0o644, 0)
                index.store(number, writer.append_bytes(column.view("u1").data, "raw"))
            content = index.content(identity, [writer.finish()], '{"kind": "files of a data set"}')
            (temporary / native.PACK_INDEX).write_bytes(content)

        publish_folder(folder, fill)

    def fault(self) -> str:
        """Describes what is impossible in the table; empty for a possible one.

        A path is checked when its file is asked for.
        """
        files, samples = self._files, self._samples
        ends = {"path_end": len(self._paths), "sample_end": len(samples)}
        for name, end in ends.items():
            column = files[name]
            if (column[1:] < column[:-1]).any() or (column[-1] if len(files) else 0) != end:
                return f"its column {name} does not divide {end}"
        given = (files["extents"] > 0).sum(axis=1)
        whole = np.where(np.isnan(samples["mean"]), 0.0, samples["mean"])
        wrong = {
            "split": files["split"] >= len(self._splits),
            "checksum": files["checksum"] >= len(CHECKSUMS),
            "bytes": files["bytes"] >= _LARGEST_FILE,
            "extents": (files["extents"] >= _LARGEST_EXTENT).any(axis=1) | (given % 3 > 0),
            "offset": (samples["offset"] >= _LARGEST_EXTENT).any(axis=1),
            "mean": ~np.isfinite(whole),
        }
        for name, rows in wrong.items():
            if rows.any():
                return f"row {int(rows.argmax())} has an impossible {name}"
        return ""

    @property
    def digest(self) -> str:
        """SHA-256 that covers all columns."""
        return self._hash(self._columns)

    @property
    def digest_of_content(self) -> str:
        """SHA-256 that covers the columns without the means."""
        files, paths, samples = self._columns
        return self._hash([files, paths, np.ascontiguousarray(samples["offset"])])

    @property
    def splits(self) -> dict[str, int]:
        """Number of samples that each split has."""
        counts = np.bincount(self._files["split"], self._lengths(), len(self._splits))
        return {name: int(n) for name, n in zip(self._splits, counts, strict=True)}

    @property
    def has_means(self) -> bool:
        """Whether the mean of every sample is known."""
        return not np.isnan(self._samples["mean"]).any()

    @property
    def has_checksums(self) -> bool:
        """Whether the checksum of every file is known."""
        return bool((self._files["checksum"] > 0).all())

    def samples_of(self, split: str) -> npt.NDArray[np.int64]:
        """Returns the numbers of a split's samples, for `sample`, in order."""
        if split not in self._splits:
            return np.empty(0, np.int64)
        chosen = self._files["split"] == self._splits.index(split)
        return np.flatnonzero(np.repeat(chosen, self._lengths()))

    def sample(self, number: int) -> Sample:
        """Returns a sample by its number among all of the data set."""
        found = self._recent_samples.get(number)
        if found is not None:
            return found
        row = self._samples[number]
        depth, height, width = row["offset"].tolist()
        mean = float(row["mean"])
        found = Sample(
            self[self._file_of(number)],
            (depth, height, width),
            1.0 if math.isnan(mean) else mean,
        )
        if len(self._recent_samples) >= _RECENT:
            self._recent_samples.clear()
        self._recent_samples[number] = found
        return found

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> DataFile: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[DataFile, ...]: ...

    def __getitem__(self, index: int | slice) -> DataFile | tuple[DataFile, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = range(len(self))[index]
        found = self._recent.get(number)
        if found is None:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            found = self._recent[number] = self._file(number)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileTable):
            return NotImplemented
        return self.digest == other.digest

    __hash__ = None  # type: ignore[assignment] # as of a list: equality reads everything

    def __reduce__(self) -> tuple[Callable[..., FileTable], tuple[Any, ...]]:
        if self._folder is not None:  # a worker process maps it, too
            return FileTable.open, (self._folder, self._splits)
        return FileTable, (*self._columns, self._splits)

    @property
    def _columns(self) -> tuple[Column, Column, Column]:
        return self._files, self._paths, self._samples

    def _hash(self, columns: Iterable[Column]) -> str:
        found = hashlib.sha256(repr(self._splits).encode())
        for column in columns:
            found.update(f"{len(column)} ".encode())
            found.update(column.view("u1").data)
        return found.hexdigest()

    def _lengths(self) -> npt.NDArray[np.int64]:
        """Returns the number of samples of each file."""
        ends = self._files["sample_end"].astype(np.int64)
        return ends - np.concatenate([[0], ends[:-1]])

    def _file_of(self, sample: int) -> int:
        return bisect_right(self._files["sample_end"], sample)  # searchsorted would copy the column

    def _file(self, number: int) -> DataFile:
        row = self._files[number]
        path_start, sample_start = (
            int(self._files[name][number - 1]) if number else 0
            for name in ("path_end", "sample_end")
        )
        try:
            text = self._paths[path_start : int(row["path_end"])].tobytes()
            path = checked_path(os.fsdecode(text))
        except ValueError as error:
            raise DataError(f"{self._folder}: damaged: {error}") from None
        samples = self._samples[sample_start : int(row["sample_end"])]
        depths, heights, widths = samples["offset"].T.tolist()
        means = tuple(samples["mean"].tolist())
        depth, height, width = row["extents"].tolist()
        kind = CHECKSUMS[row["checksum"]]
        digits = f"{int(row['crc']):08x}" if kind else ""
        return DataFile(
            path,
            self._splits[row["split"]],
            int(row["bytes"]),
            f"crc32c:{digits}" if kind == "crc32c" else digits,
            tuple(zip(depths, heights, widths, strict=True)),
            () if means and math.isnan(means[0]) else means,
            (depth, height, width) if depth else None,
        )
