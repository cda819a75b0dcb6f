"""Reads and writes Zarr version 3: a folder with one array, or group of arrays, a sample.

Only the folder's own files are read, each array through the rules of `zarr_rules`. Chunks that a
block meets are read and decompressed by the zarr package, several at a time; of a shard, only the
index and those chunks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.formats import Driver, Storage, StoredArray, StoredFile
from pydist.data.hdf5_rules import Limits
from pydist.data.publish import publish_folder
from pydist.data.regular import Stamp, TrustedTree, first_change
from pydist.data.zarr_rules import COMPLETE, check_array
from pydist.errors import DataError, UsageError, one_line
from pydist.parsing import parse_json

METADATA = "zarr.json"
_OLD_METADATA = (".zarray", ".zgroup")
_MOST_METADATA = 1 << 24
"""Bytes of the largest `zarr.json`."""


class ZarrFile(StoredFile):
    """A folder that holds arrays of Zarr version 3."""

    errors = (*StoredFile.errors, TypeError, ArithmeticError, RuntimeError)
    suffix = ".zarr"

    def __init__(self, path: Path, allow_roots: Sequence[str | Path] = ()) -> None:
        super().__init__(path)
        self._tree = TrustedTree(path, allow_roots)
        self._limits = Limits()
        self._stamps: dict[Path, Stamp] = {}
        """Of the metadata that were read."""

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Returns whether a path is a Zarr folder."""
        return path.is_dir() and any((path / name).exists() for name in (METADATA, *_OLD_METADATA))

    @classmethod
    def open(
        cls, path: Path, allow_roots: Sequence[str | Path] = (), driver: Driver | None = None
    ) -> ZarrFile:
        """Opens a folder; see `StoredFile.open`."""
        require_zarr()
        super().open(path, allow_roots, driver)  # refuses a driver
        if not path.is_dir():
            raise DataError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
        if any((path / name).exists() for name in _OLD_METADATA):
            raise DataError(f"{path}: of Zarr version 2; version 3 is read (`zarr migrate v3`)")
        return cls(path, allow_roots)

    def dataset(self, name: str) -> StoredArray:
        """Finds and checks an array of numbers.

        Raises:
            DataError: there is none of that name, or it breaks a rule.
        """
        from pydist.data.zarr_store import open_array

        if len(name.split("/")) > self._limits.depth:
            raise DataError(f"{self.path}: {name!r} is too deep")
        tree = self._tree.inner(name)
        where = f"{self.path}: {name!r}"
        checked = check_array(where, self._metadata(name, tree), self._limits)
        if checked.declared_bytes > self._limits.declared_bytes:
            self._require_held(where, tree.root, checked.declared_bytes)
        try:
            return open_array(tree, checked)
        except self.errors as error:
            line = one_line(error)
            raise DataError(f"{where} is damaged: {type(error).__name__} {line}") from error

    def read(
        self,
        dataset: StoredArray,
        window: tuple[slice, ...],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Reads a part of an array, directly into `out` if it has the array's type."""
        from zarr import Array
        from zarr.buffer.cpu import NDBuffer

        assert isinstance(dataset, Array)
        # The index of a damaged shard may overflow; the parts that it names are checked.
        with np.errstate(over="ignore"):
            if out is None or out.dtype != dataset.dtype or out.shape == ():
                return super().read(dataset, window or (slice(None),) * dataset.ndim, out)
            buffer = NDBuffer.from_numpy_array(out)
            dataset.get_basic_selection(window or ..., out=buffer)
        return out

    def change(self) -> str | None:
        """Describes a change of the metadata since they were read.

        Chunks are compared before and after their reads.
        """
        return first_change(self._stamps)

    def texts(self) -> dict[str, str]:
        """Returns the texts among the attributes of the group."""
        if not (self.path / METADATA).exists():
            return {}
        record = self._metadata("", self._tree)
        attributes = record.get("attributes") if isinstance(record, dict) else None
        if not isinstance(attributes, dict):
            return {}
        return {name: text for name, text in attributes.items() if isinstance(text, str)}

    @classmethod
    def check_storage(cls, storage: Storage) -> None:
        """Checks that Zarr files can be written; see `StoredFile.check_storage`."""
        require_zarr()

    @classmethod
    def write(
        cls,
        path: Path,
        arrays: Mapping[str, npt.NDArray[Any]],
        texts: Mapping[str, str],
        storage: Storage,
    ) -> None:
        """Writes arrays with all their chunks; see `StoredFile.write`."""
        publish_folder(path, lambda folder: _fill(folder, arrays, texts, storage))

    def _metadata(self, name: str, tree: TrustedTree) -> Any:
        """Returns the JSON of an array's or a group's metadata."""
        path = tree.root / METADATA
        try:
            descriptor, status = tree.open(METADATA)
        except (FileNotFoundError, NotADirectoryError):
            found = sorted(each.name for each in self.path.iterdir() if each.is_dir())
            shown = ", ".join(found[: self._limits.names]) or "nothing"
            raise DataError(f"{self.path}: no array {name!r}; it has {shown}") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            text = file.read(_MOST_METADATA + 1)
        if len(text) > _MOST_METADATA:
            raise DataError(f"{path}: more than {_MOST_METADATA} bytes")
        self._stamps[path] = Stamp.of(status)
        try:
            return parse_json(text)
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {' '.join(str(error).split())}") from error

    def _require_held(self, where: str, folder: Path, declared: int) -> None:
        """Refuses an array that declares far more than its files hold."""
        held = 0
        for parent, _, names in os.walk(folder):
            held += sum((Path(parent) / name).lstat().st_size for name in names)
            if declared <= self._limits.ratio * held:
                return
        raise DataError(f"{where} declares {declared} bytes and holds {held}")


def require_zarr() -> None:
    """Raises `UsageError` if the zarr package is not installed."""
    try:
        import zarr.buffer  # noqa: F401  checks that zarr has version 3.1
    except ImportError:
        raise UsageError(
            "Zarr files need zarr 3.1 or later (Python 3.11): pip install 'pydist[zarr]'"
        ) from None


def _fill(
    folder: Path,
    arrays: Mapping[str, npt.NDArray[Any]],
    texts: Mapping[str, str],
    storage: Storage,
) -> None:
    """Writes a group with arrays into an empty folder."""
    import zarr
    from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

    compressors: dict[str, Any] = {
        "none": (),
        "gzip": (GzipCodec(level=4),),
        "zstd": (ZstdCodec(level=3, checksum=True),),
        "blosc": (BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"),),
    }
    config: Any = {"write_empty_chunks": True}
    root = zarr.create_group(folder, attributes=dict(texts))
    for name, values in arrays.items():
        chunks, shards = storage.of(values.shape)
        array = root.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunks,
            shards=shards,
            compressors=compressors[storage.compression],
            filters=(),
            fill_value=0,
            attributes={COMPLETE: True},
            config=config,
        )
        array[...] = values
