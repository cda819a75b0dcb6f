"""Reading of data sets: counts of the bytes that HDF5 reads, and a read by a spawned process."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydist.data import ShardDataset


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
