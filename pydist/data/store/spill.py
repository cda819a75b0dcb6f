"""Writes and reads a rank's blocks on a disk of its machine, a partition of a pack.

It belongs to one run and has no name, so nothing is left of a run however it ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from pydist import owner
from pydist._loader import native


class Spill:
    """File that holds blocks on disk, written by one thread and read by any.

    Args:
        folder: an existing folder.
        codec: compresses each block that gets smaller by it.
        item_size: bytes of one value, by which "blosc" sorts them.

    Attributes:
        nbytes: bytes of the blocks.
        stored_bytes: the same after compression.
        lasts: whether the next run can have the blocks.
    """

    lasts = False

    def __init__(self, folder: Path, codec: str, item_size: int) -> None:
        self.folder, self.codec, self.item_size = folder, codec, item_size
        self.nbytes = self.stored_bytes = 0
        self._id = os.urandom(16)
        self._partition = 0
        self._writer: native.PartitionWriter | None = None
        self._records: dict[int, native.PackedFile] = {}
        self._reads: dict[int, Callable[[Tensor], None]] = {}
        self._changing = threading.Lock()

    def __contains__(self, sample: int) -> bool:
        return sample in self._reads

    @property
    def samples(self) -> list[int]:
        """The samples whose blocks are on disk, in order."""
        return sorted(self._reads)

    def write(self, sample: int, block: Tensor) -> None:
        """Writes a block, a vector of uint8; raises `DiskError`."""
        if self._writer is None:
            self._writer = self._open()
        stored = self._writer.append_bytes(block, self.codec, self.item_size)
        self._enter(sample, stored, partial(self._writer.read, stored))

    def read(self, sample: int, out: Tensor) -> int:
        """Reads a block into a vector of its size; returns the bytes read from disk.

        Raises:
            DataError: it can't be read, or does not match its checksum.
        """
        self._reads[sample](out)
        return self._records[sample].stored_size

    def forget(self, sample: int) -> None:
        """Forgets a block; its place in the file stays unused."""
        with self._changing:
            self._drop(sample)

    def publish(self) -> None:
        """Makes the blocks written so far available to the next run, if it may have them."""

    def close(self) -> None:
        """Closes the files; nothing is read or written anymore."""
        self._reads.clear()
        self._writer = None

    def _open(self) -> native.PartitionWriter:
        path = owner.temporary(self.folder / ".pydist-store")
        writer = native.PartitionWriter(os.fsencode(path), self._partition, self._id)
        path.unlink()
        return writer

    def _stored(self) -> list[tuple[int, native.PackedFile]]:
        """Returns where all blocks are, by sample; other threads may forget some meanwhile."""
        with self._changing:
            return sorted(self._records.items(), key=lambda each: each[0])

    def _enter(
        self, sample: int, stored: native.PackedFile, read: Callable[[Tensor], None]
    ) -> None:
        with self._changing:
            self._drop(sample)
            self._records[sample] = stored
            self._reads[sample] = read
            self.nbytes += stored.raw_size
            self.stored_bytes += stored.stored_size

    def _drop(self, sample: int) -> None:
        stored = self._records.pop(sample, None)
        if stored is not None:
            del self._reads[sample]
            self.nbytes -= stored.raw_size
            self.stored_bytes -= stored.stored_size
