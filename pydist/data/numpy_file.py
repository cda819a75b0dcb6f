"""Reads and writes folders of NumPy files: one `.npy` file for each array of a sample.

Arrays are mapped into memory, so that a read copies only the block. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.formats import Driver, Storage, StoredArray, StoredFile
from pydist.data.publish import publish_folder
from pydist.data.regular import Stamp, TrustedTree, first_change
from pydist.errors import DataError, UsageError, one_line
from pydist.parsing import parse_json

SUFFIX = ".npy"
_TEXTS = "texts.json"
_MOST_TEXTS = 1 << 24
"""Bytes of the largest `texts.json`."""
_OF_HEADERS = (
    ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TokenError, TypeError,
)  # fmt: skip
"""Exceptions that NumPy's parsers raise for damaged headers, besides `ValueError`."""


class NumpyFolder(StoredFile):
    """A folder that has a `.npy` file for each array."""

    errors = (*StoredFile.errors, TypeError, ArithmeticError)

    def __init__(self, path: Path, allow_roots: Sequence[str | Path] = ()) -> None:
        super().__init__(path)
        self._tree = TrustedTree(path, allow_roots)
        self._stamps: dict[Path, Stamp] = {}

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Returns whether a path is a folder with NumPy files."""
        return path.is_dir() and any(each.suffix == SUFFIX for each in path.iterdir())

    @classmethod
    def open(
        cls, path: Path, allow_roots: Sequence[str | Path] = (), driver: Driver | None = None
    ) -> NumpyFolder:
        """Opens a folder; see `StoredFile.open`."""
        super().open(path, allow_roots, driver)  # refuses a driver
        if not path.is_dir():
            raise DataError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
        return cls(path, allow_roots)

    def dataset(self, name: str) -> StoredArray:
        """Maps an array of numbers into memory.

        Raises:
            DataError: there is none of that name, it is damaged, or it holds something else.
        """
        path = self._tree.root / f"{name}{SUFFIX}"
        try:
            descriptor, status = self._tree.open(f"{name}{SUFFIX}")
        except FileNotFoundError:
            found = sorted(each.stem for each in self.path.iterdir() if each.suffix == SUFFIX)
            shown = ", ".join(found[:20]) or "nothing"
            raise DataError(f"{self.path}: no array {name!r}; it has {shown}") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            try:
                array = _map(file, status.st_size)
            except self.errors as error:
                raise DataError(f"{path}: damaged, or not NumPy's: {one_line(error)}") from error
        self._stamps[path] = Stamp.of(status)
        return array

    def read(
        self,
        dataset: StoredArray,
        window: tuple[slice, ...],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Copies a part of an array."""
        # Memory of a file that shrank can't be read: the process would end with a signal.
        if (change := self.change()) is not None:
            raise DataError(change)
        found = super().read(dataset, window, out)
        return np.array(found) if out is None else found

    def change(self) -> str | None:
        """Describes a change of a file since it was mapped."""
        return first_change(self._stamps)

    def texts(self) -> dict[str, str]:
        """Returns the texts that `write` has stored."""
        try:
            descriptor, status = self._tree.open(_TEXTS)
        except FileNotFoundError:
            return {}
        with os.fdopen(descriptor, "rb") as file:
            if status.st_size > _MOST_TEXTS:
                raise DataError(
                    f"{self.path / _TEXTS}: {status.st_size} bytes; {_MOST_TEXTS} are possible"
                )
            try:
                record = parse_json(file.read())
            except ValueError as error:
                raise DataError(f"{self.path / _TEXTS}: not JSON: {error}") from error
        found = record.items() if isinstance(record, dict) else ()
        return {name: text for name, text in found if isinstance(text, str)}

    @classmethod
    def check_storage(cls, storage: Storage) -> None:
        """Checks that a kind of storage is NumPy's; see `StoredFile.check_storage`."""
        if storage.chunks or storage.shards or storage.compression != "none":
            raise UsageError("NumPy files have no chunks, shards or compression")

    @classmethod
    def write(
        cls,
        path: Path,
        arrays: Mapping[str, npt.NDArray[Any]],
        texts: Mapping[str, str],
        storage: Storage,
    ) -> None:
        """Writes arrays as files; see `StoredFile.write`."""

        def fill(folder: Path) -> None:
            for name, values in arrays.items():
                target = folder / f"{name}{SUFFIX}"
                target.parent.mkdir(parents=True, exist_ok=True)
                np.save(target, np.ascontiguousarray(values), allow_pickle=False)
            if texts:
                (folder / _TEXTS).write_text(json.dumps(dict(texts)))

        publish_folder(path, fill)


def _map(file: Any, size: int) -> npt.NDArray[Any]:
    """Maps the array of an open file.

    Raises:
        ValueError: the header is damaged, or says something that the file does not hold.
    """
    shape, backwards, dtype = read_header(file)
    start, needed = file.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=1) < 0 or start + needed > size:
        raise ValueError(f"cut short: {start + needed} bytes are declared, it has {size}")
    order: Any = "F" if backwards else "C"
    if not needed:
        return np.empty(shape, dtype, order)
    return np.memmap(file, dtype, "r", start, shape, order)


def read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the header of a `.npy` file: shape, whether the first index runs fastest, and type.

    Raises:
        ValueError: the header is damaged, or values are other than real numbers of up to 8 bytes.
    """
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"its format has the version {version}; 1.0 and 2.0 are read")
    try:
        shape, backwards, dtype = readers[version](file)
    except _OF_HEADERS:
        raise ValueError("its header is damaged") from None
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"it holds {dtype}; real numbers of up to 8 bytes are needed")
    return shape, backwards, dtype


def read_array(path: Path) -> npt.NDArray[Any]:
    """Reads the array of a `.npy` file, in the machine's byte order.

    Raises:
        DataError: there is no such file, it is damaged, or it holds other than real numbers.
    """
    try:
        # Opening a pipe would wait for its other end.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path}: not a regular file")
            found = _map(file, status.st_size)
            return np.array(found, found.dtype.newbyteorder("="), order="C")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except NumpyFolder.errors as error:
        raise DataError(f"{path}: damaged, or not NumPy's: {one_line(error)}") from error
