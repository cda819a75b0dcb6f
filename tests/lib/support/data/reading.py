"""Reading of data sets: the bytes that HDF5 reads, and a read for a process that is spawned."""

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
    """Makes counting files, and says how many bytes a read took."""

    def __init__(self) -> None:
        self.files: list[CountingFile] = []

    def __call__(self, path: Path) -> CountingFile:
        self.files.append(CountingFile(path))
        return self.files[-1]

    @property
    def count(self) -> int:
        """Bytes read so far."""
        return sum(f.count for f in self.files)

    def of(self, read: Callable[[], object]) -> int:
        """Bytes that a call reads."""
        before = self.count
        read()
        return self.count - before


def first_block(dataset: ShardDataset) -> list[float]:
    """The values of the first sample; a spawned process finds this module, but no test module."""
    return dataset.read_block(0).flatten().tolist()
