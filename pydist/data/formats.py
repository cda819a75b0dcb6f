"""What a file format of data sets has to bring: named arrays, of which any box can be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from pydist.errors import UsageError


class Readable(Protocol):
    """A Python file object to read from."""

    def readinto(self, buffer: Any, /) -> int | None:
        """Fills the buffer from the current position."""
        ...

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Moves the position."""
        ...

    def tell(self) -> int:
        """The position."""
        ...


class StoredArray(Protocol):
    """An array in a file, such as `h5py.Dataset`, `numpy.memmap` or `zarr.Array`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored type."""
        ...

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        ...

    def __getitem__(self, window: tuple[slice, ...], /) -> Any:
        """Reads a part; nothing else is read from the disk."""
        ...


class StoredFile(ABC):
    """A file of a data set, open for reading. A format is a subclass.

    Its name in `pydist.registry.FORMATS` is what a manifest's `file_format` says. Reads of one file
    are never concurrent.

    Args:
        path: the file, or the folder that the format takes for one.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (
        OSError, LookupError, ValueError, EOFError, SyntaxError, TokenError,
    )  # fmt: skip
    """What opening and reading raise for missing or damaged content; becomes one clear line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(
        cls, path: Path, allow_roots: Sequence[str | Path] = (), driver: Readable | None = None
    ) -> StoredFile:
        """Opens a file.

        Args:
            path: the file.
            allow_roots: folders that links in the file may lead to.
            driver: read from this object instead of from `path`.

        Raises:
            DataError: the file is missing or damaged, or the format knows no such option.
        """
        if driver is not None:
            raise UsageError(f"{path}: files of this format can't be read through a driver")
        return cls(path)

    @abstractmethod
    def dataset(self, name: str) -> StoredArray:
        """The array with a name.

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
            window: which part; empty for all.
            out: where to put it: contiguous, of the part's shape and the array's dtype.

        Returns:
            The part; `out` if that is given.
        """
        found = np.asarray(dataset[window])
        if out is None:
            return found
        if found.shape != out.shape:
            raise ValueError(f"{found.shape} was read where {out.shape} was asked for")
        out[...] = found
        return out

    def change(self) -> str | None:
        """What happened to the file since it was opened, in one line; `None` for nothing.

        Asked after each read, whose values count only if there was no change.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most formats hold nothing
        """Closes it; nothing is read from it afterwards."""
