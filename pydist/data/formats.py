"""The interface of a file format: named arrays that can be read by boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pydist.data.mpi_io import MpiIo
from pydist.data.options import Compression
from pydist.errors import UsageError


class Readable(Protocol):
    """Python file object that can be read from."""

    def readinto(self, buffer: Any, /) -> int | None:
        """Fills the buffer from the current position."""
        ...

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Moves the position."""
        ...

    def tell(self) -> int:
        """Returns the position."""
        ...


Driver: TypeAlias = Readable | MpiIo
"""What reads a file instead of its format's library: a Python file object, or MPI-IO."""


class StoredArray(Protocol):
    """Array that is stored in a file, such as `h5py.Dataset`, `numpy.memmap` or `zarr.Array`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents that the array has."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type that stored elements have."""
        ...

    @property
    def ndim(self) -> int:
        """Number of dims that the array has."""
        ...

    def __getitem__(self, window: tuple[slice, ...], /) -> Any:
        """Reads a part of the array, and nothing else, from the disk."""
        ...


@dataclass(frozen=True)
class Storage:
    """How `StoredFile.write` stores arrays: [C, D, H, W] or [D, H, W, C], labels [D, H, W], others.

    Attributes:
        chunks: extents (D, H, W) of a chunk; empty for the format's default. A chunk holds one
            channel where channels come first, all where they come last.
        shards: extents (D, H, W) of a shard, a file with all channels of several chunks; empty for
            one file a chunk.
        compression: of chunks.
        channels_last: whether channels come last.
    """

    chunks: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    compression: Compression = "none"
    channels_last: bool = False

    def __post_init__(self) -> None:
        for name, extents in (("chunks", self.chunks), ("shards", self.shards)):
            if len(extents) not in (0, 3) or min(extents, default=1) < 1:
                raise UsageError(f"{name}={extents}: voxels along depth, height and width")
        chunks = self.chunks or (SIDE,) * 3
        if any(s % c for s, c in zip(self.shards, chunks, strict=False)):
            raise UsageError(f"shards={self.shards}: multiples of the chunks' {chunks}")

    def of(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Returns the extents of an array's chunks, and of its shards (None without)."""
        if len(shape) not in (3, 4):
            return tuple(max(1, n) for n in shape), None
        axis = 3 if self.channels_last else 0
        voxels = [n for i, n in enumerate(shape) if len(shape) == 3 or i != axis]
        wanted = self.chunks or (SIDE,) * 3
        chunks = [max(1, min(c, n)) for c, n in zip(wanted, voxels, strict=True)]
        shards = [
            c * -(-min(s, n) // c) for s, c, n in zip(self.shards, chunks, voxels, strict=False)
        ]
        if len(shape) == 4:
            chunks.insert(axis, shape[3] if self.channels_last else 1)
            shards.insert(axis, shape[axis])
        return tuple(chunks), tuple(shards) if self.shards else None


SIDE = 32
"""Voxels along a side of a chunk, by default: 64 kB of int16."""


class StoredFile(ABC):
    """A file of a data set, open for reading; each format is a subclass.

    A manifest's `file_format` is the subclass's name in `pydist.registry.FORMATS`. Reads of one
    file are never concurrent.

    Args:
        path: the file, or the folder that serves as one in this format.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (OSError, LookupError, ValueError, EOFError)
    """Exceptions of opening and reading missing or damaged content; reported in one line."""
    suffix: ClassVar[str] = ""
    """How the names of files end that `pydist data convert` writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(
        cls, path: Path, allow_roots: Sequence[str | Path] = (), driver: Driver | None = None
    ) -> StoredFile:
        """Opens a file.

        Args:
            path: the file.
            allow_roots: folders that links in the file may lead to.
            driver: reads it instead of the format's library.

        Raises:
            DataError: the file is missing or damaged.
            UsageError: the format has no such option.
        """
        if driver is not None:
            raise UsageError(f"{path}: files of this format can't be read through a driver")
        return cls(path)

    @abstractmethod
    def dataset(self, name: str) -> StoredArray:
        """Returns the array with a name.

        Raises:
            DataError: there is none, or one of `errors`.
        """

    def read(
        self,
        dataset: StoredArray,
        window: tuple[slice, ...],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Reads a part of an array.

        Args:
            dataset: the array.
            window: the part; empty for the full array.
            out: the destination: contiguous, of the part's shape and the array's dtype.

        Returns:
            The part; `out` if given.
        """
        found = np.asarray(dataset[window])
        if out is None:
            return found
        if found.shape != out.shape:
            raise ValueError(f"{found.shape} was read where {out.shape} was asked for")
        out[...] = found
        return out

    def texts(self) -> dict[str, str]:
        """Returns the texts that are stored beside the arrays, by name."""
        return {}

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Returns whether a path looks like a file of this format, for `index_folder`."""
        return False

    @classmethod
    def check_storage(cls, storage: Storage) -> None:
        """Checks that files of this format can be written, for `convert_dataset`.

        Raises:
            UsageError: they can't, or not with this storage.
        """
        raise UsageError("files of this format can't be written")

    @classmethod
    def write(
        cls,
        path: Path,
        arrays: Mapping[str, npt.NDArray[Any]],
        texts: Mapping[str, str],
        storage: Storage,
    ) -> None:
        """Writes a file atomically, for `convert_dataset`.

        Args:
            path: the file.
            arrays: the content by name.
            texts: texts to store beside the arrays, by name.
            storage: chunks and compression; `check_storage` accepts it.

        Raises:
            DiskError: the disk is full, or the folder can't be written.
        """
        cls.check_storage(storage)

    def change(self) -> str | None:
        """Describes a change of the file since it was opened, in one line; `None` for none.

        Called after each read, whose values count only if there was no change.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most formats hold nothing
        """Closes the file; nothing is read from it afterwards."""
