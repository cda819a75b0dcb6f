"""A batch's blocks from the ranks that hold them, and from files where no rank does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from pydist.data.blocks import BlockSource, SourceOver, StoredSource
from pydist.data.store.entry import Entry, copy
from pydist.data.store.figures import Figures
from pydist.data.store.holdings import Holdings
from pydist.interop import ArrayLike, as_tensor
from pydist.partition import Box

_T = TypeVar("_T")


class _Found(NamedTuple):
    """An entry of this rank, as it was found."""

    sample: int
    entry: Entry | None
    from_disk: bool


class BatchSource(SourceOver):
    """`BlockSource` that reads one batch's blocks from the store's entries, or else from files.

    An entry that its owner could not read, or with a bad value, is read from the file as without a
    store: with the same result, or the same error.

    Args:
        dataset: reads files.
        raw: whether entries hold stored values, which are normalized here; else inputs.
        received: entries of samples that other ranks hold.
        own: samples that this rank holds.
        keeps: samples that this rank is to hold after their read.
        holdings: this rank's entries.
    """

    def __init__(
        self,
        dataset: BlockSource,
        raw: bool,
        received: Mapping[int, Entry],
        own: Collection[int],
        keeps: Collection[int],
        holdings: Holdings,
    ) -> None:
        super().__init__(dataset)
        self.figures = Figures()
        """Counts of the reads so far."""
        self._raw = raw
        self._received = received
        self._own = own
        self._keeps = keeps
        self._holdings = holdings
        self._latest = _Found(-1, None, from_disk=False)
        """The latest own entry: if it was read from disk, its targets are in memory with it."""

    def read_block(
        self, index: int, box: Box | None = None, out: Tensor | None = None
    ) -> ArrayLike:
        """Returns the input of a block, from memory in `out`; see `BlockSource.read_block`."""
        self.figures.blocks += 1
        entry = self._good(index)
        if entry is not None and out is not None:
            if not self._raw:
                copy(entry.block, out)
                return self._counted(index, out)
            if self._normalize(index, box, entry.block, out):
                return self._counted(index, out)
        self.figures.file_blocks += 1
        kept = self._kept(index)
        if kept is not None and out is not None and self._raw:
            stored, room = cast(StoredSource, self.dataset), kept.block
            self.from_file(lambda: stored.read_stored(index, box, room))
            if self._normalize(index, box, room, out):
                return out
            kept = None  # the read below fails as without a store
        block = self.from_file(lambda: self.dataset.read_block(index, box, out))
        if kept is not None:
            copy(as_tensor(block), kept.block)
        return block

    def read_labels(
        self, index: int, box: Box | None = None, out: Tensor | None = None
    ) -> ArrayLike:
        """Returns the labels of a block, from memory in `out`; see `BlockSource.read_labels`."""
        entry = self._good(index)
        if entry is not None and out is not None:
            copy(entry.targets, out)
            return out
        return self._targets(index, lambda: self.dataset.read_labels(index, box, out))

    def target(self, index: int) -> ArrayLike:
        """Returns the values to predict; see `BlockSource.target`."""
        entry = self._good(index)
        if entry is not None:
            return entry.targets
        return self._targets(index, lambda: self.dataset.target(index))

    def _targets(self, index: int, read: Callable[[], ArrayLike]) -> ArrayLike:
        """Reads labels or target from the file, and completes the entry if it is to be kept."""
        targets = self.from_file(read)
        kept = self._kept(index)
        if kept is not None:
            copy(as_tensor(targets), kept.targets)
            kept.approve()
            self._holdings.filled(index)
        return targets

    def _normalize(self, index: int, box: Box | None, stored: Tensor, out: Tensor) -> bool:
        """Computes the input from stored values; returns whether all of it is finite."""
        found = torch.zeros(1, dtype=torch.int32)
        first = 0 if box is None else box.lo[0]
        cast(StoredSource, self.dataset).normalize(index, first, stored, out, found)
        return not int(found)

    def _good(self, index: int) -> Entry | None:
        entry = self._received.get(index) or self._find(index)
        return entry if entry is not None and entry.is_good else None

    def _find(self, index: int) -> Entry | None:
        if index not in self._own:
            return None
        if self._latest.sample != index:
            entry = self._holdings.in_memory(index)
            from_disk = entry is None
            self._latest = _Found(index, entry or self._holdings.find(index), from_disk)
        return self._latest.entry

    def _counted(self, index: int, out: Tensor) -> Tensor:
        """Counts a block that did not come from a file."""
        self.figures.disk_blocks += self._latest.sample == index and self._latest.from_disk
        return out

    def _kept(self, index: int) -> Entry | None:
        """Returns the entry to fill of a sample that this rank is to hold; None for others."""
        return self._holdings.blank(index) if index in self._keeps else None

    def from_file(self, read: Callable[[], _T]) -> _T:
        """Reads from a file, and counts the bytes if the source does."""
        before = getattr(self.dataset, "bytes_read", 0)
        try:
            return read()
        finally:
            self.figures.file_bytes += getattr(self.dataset, "bytes_read", 0) - before


class StoredBatchSource(BatchSource):
    """`BatchSource` for a device, which normalizes the stored values."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type that stored values have; see `StoredSource.stored_dtype`."""
        return cast(StoredSource, self.dataset).stored_dtype

    def read_stored(self, index: int, box: Box | None, out: Tensor) -> None:
        """Copies the stored values of `box` into `out`; see `StoredSource.read_stored`."""
        self.figures.blocks += 1
        entry = self._good(index)
        if entry is not None:
            copy(entry.block, out)
            self._counted(index, out)
            return
        self.figures.file_blocks += 1
        stored = cast(StoredSource, self.dataset)
        self.from_file(lambda: stored.read_stored(index, box, out))
        kept = self._kept(index)
        if kept is not None:
            copy(out, kept.block)

    def normalize(
        self, index: int, first_channel: int, stored: Tensor, out: Tensor, found: Tensor
    ) -> None:
        """Converts stored values to inputs, into `out`; see `StoredSource.normalize`."""
        cast(StoredSource, self.dataset).normalize(index, first_channel, stored, out, found)
