"""The blocks that a rank holds: in its memory, and beyond that on its disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from pydist.data.store.disk import Disk, HeldBlock
from pydist.data.store.entry import Entry, EntryFormat


class Holdings:
    """Entries of the samples that this rank holds.

    A part of the memory's limit that is free holds copies of entries on disk.

    Args:
        format_of: returns the format of a sample's entry.
        limit: bytes of entries in memory.
        disk: holds the others; None without one.
    """

    def __init__(
        self, format_of: Callable[[int], EntryFormat], limit: int, disk: Disk | None
    ) -> None:
        self.entries: dict[int, Entry] = {}
        """Entries in memory, also those that are still to be filled."""
        self.disk = disk
        self._format_of, self._limit = format_of, limit
        self._for_disk: set[int] = set()
        self._copies: dict[int, Entry] = {}
        self._reserved = 0
        """Bytes of the samples that have their place in memory."""
        self._copied = 0
        """Bytes of the copies."""
        self._changing = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes that all entries in memory have."""
        entries = [*list(self.entries.values()), *list(self._copies.values())]
        leaving = 0 if self.disk is None else self.disk.leaving_bytes
        return sum(entry.memory.nbytes for entry in entries) + leaving

    def keep(self, sample: int, on_disk: bool) -> None:
        """Reserves the place of a new sample, in memory or on disk."""
        with self._changing:
            if on_disk:
                self._for_disk.add(sample)
                return
            self._reserved += self._format_of(sample).nbytes
            while self._copies and self._reserved + self._copied > self._limit:
                self._copied -= self._copies.popitem()[1].memory.nbytes

    def drop(self, sample: int) -> None:
        """Forgets a sample."""
        with self._changing:
            self.entries.pop(sample, None)
            if sample in self._copies:
                self._copied -= self._copies.pop(sample).memory.nbytes
            if sample not in self._for_disk:
                self._reserved -= self._format_of(sample).nbytes
            self._for_disk.discard(sample)
        if self.disk is not None:
            self.disk.forget(sample)

    def blank(self, sample: int) -> Entry:
        """Returns the entry of a sample that was kept, to be filled."""
        found = self.entries.get(sample)
        if found is None:
            found = self.entries[sample] = Entry(self._format_of(sample))
        return found

    def filled(self, sample: int) -> None:
        """Moves an entry that has been filled to its place; may wait for the disk."""
        if self.disk is not None and sample in self._for_disk:
            self.disk.put(sample, self.entries[sample])
            del self.entries[sample]

    def find(self, sample: int) -> Entry | None:
        """Returns a sample's entry, from memory or from disk; None if there is none."""
        found = self.in_memory(sample)
        if found is not None or self.disk is None:
            return found
        found = self.disk.find(sample)
        if found is not None:
            self._copy(sample, found)
        return found

    def in_memory(self, sample: int) -> Entry | None:
        """Returns a sample's entry if it is in memory."""
        return self.entries.get(sample) or self._copies.get(sample)

    def fetch(self, sample: int) -> Future[Entry | None] | None:
        """Starts reading a sample from disk; returns None if it is not there, or in memory."""
        if self.disk is None or self.in_memory(sample) is not None:
            return None
        return self.disk.fetch(sample)

    def adopt(self, sample: int) -> None:
        """Takes over a sample that an earlier run left on disk."""
        self._for_disk.add(sample)

    def save(self, with_memory: bool) -> None:
        """Makes the samples available to the next run, in the background.

        Args:
            with_memory: whether to write those in memory as well, as far as the disk's limit
                allows.
        """
        if self.disk is not None:
            self.disk.save(self._blocks() if with_memory else [])

    def close(self, save: bool) -> None:
        """Releases memory and disk.

        Args:
            save: whether to make the samples available to the next run before.
        """
        if self.disk is not None:
            self.disk.close(self._blocks() if save else None)
        self.entries.clear()
        self._copies.clear()

    def _blocks(self) -> list[HeldBlock]:
        return list(self.entries.items())

    def _copy(self, sample: int, entry: Entry) -> None:
        """Keeps an entry from disk in memory, if a part of the limit is free."""
        with self._changing:
            nbytes = entry.memory.nbytes
            fits = self._reserved + self._copied + nbytes <= self._limit
            if fits and sample in self._for_disk and sample not in self._copies:
                self._copies[sample] = entry
                self._copied += nbytes
