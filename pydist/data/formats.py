"""The interface of a file format: named arrays that can be read by boxes."""

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


class StoredFile(ABC):
    """A file of a data set, open for reading; each format is a subclass.

    A manifest's `file_format` is the subclass's name in `pydist.registry.FORMATS`. Reads of one
    file are never concurrent.

    Args:
        path: the file, or the folder that serves as one in this format.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (
        OSError, LookupError, ValueError, EOFError, SyntaxError, TokenError,
    )  # fmt: skip
    """Exceptions of opening and reading missing or damaged content; reported in one line."""

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

    def change(self) -> str | None:
        """Describes a change of the file since it was opened, in one line; `None` for none.

        Called after each read, whose values count only if there was no change.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most formats hold nothing
        """Closes the file; nothing is read from it afterwards."""
