"""Reading of data sets: counts of bytes that HDF5 reads, a read by a spawned process, refusals."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydist.data import ShardDataset
from pydist.errors import DataError


class CountingFile(io.BytesIO):
    """A file's content that counts the bytes HDF5 reads of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.read_bytes())
        self.count = 0

    def readinto(self, buffer: Any) -> int:
        self.count += len(buffer)
        return super().readinto(buffer)


class Meter:
    """Factory of counting files that reports how many bytes a read took."""

    def __init__(self) -> None:
        self.files: list[CountingFile] = []

    def __call__(self, path: Path) -> CountingFile:
        self.files.append(CountingFile(path))
        return self.files[-1]

    @property
    def count(self) -> int:
        """Number of bytes that have been read so far."""
        return sum(f.count for f in self.files)

    def of(self, read: Callable[[], object]) -> int:
        """Returns the number of bytes that a call reads."""
        before = self.count
        read()
        return self.count - before


def first_block(dataset: ShardDataset) -> list[float]:
    """Returns the first sample's values; here, as a spawned process can't import test modules."""
    return dataset.read_block(0).flatten().tolist()


def refusal_of(
    call: Callable[[], object],
    path: Path | None = None,
    kind: type[Exception] | tuple[type[Exception], ...] = DataError,
) -> str:
    """Returns the line with which a call refuses; it is short, and names the path."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert path is None or str(path) in message
    assert len(message) < 500
    return message
