"""The disk of a rank's store: blocks are written and read in the background."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pydist.data.store.entry import Entry, EntryFormat
from pydist.data.store.spill import Spill
from pydist.watchdog import phase

_WAITING = 2
"""Blocks that may wait for being written; more would take memory beyond the budget."""
_READERS = 2
"""Threads that read blocks which are to be sent."""

HeldBlock = tuple[int, Entry]
"""A sample and its entry."""


class Disk:
    """Disk that holds entries: one thread writes them, others read them.

    No failure of the disk ends the run. After a failed write (disk full, folder lost) nothing more
    is written; a block that does not match its checksum is lost. The entry of a lost block is not
    found, and its consumer reads the file.

    Args:
        spill: the files.
        format_of: returns the format of a sample's entry.
        limit: bytes of entries, before compression.
        warn: is called with one line at the first failed write, and at the first failed read.

    Attributes:
        read_bytes: bytes read from disk so far.
        lost: blocks that could not be written or read so far.
    """

    def __init__(
        self,
        spill: Spill,
        format_of: Callable[[int], EntryFormat],
        limit: int,
        warn: Callable[[str], None],
    ) -> None:
        self.spill = spill
        self.read_bytes = self.lost = 0
        self._format_of, self._limit, self._warn = format_of, limit, warn
        self._works = True
        self._has_warned: set[str] = set()
        self._counting = threading.Lock()
        self._leaving: dict[int, Entry] = {}
        """Entries that are still in memory, as they wait for being written."""
        self._room = threading.Semaphore(_WAITING)
        self._saving: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "pydist-spill")
        self._readers = ThreadPoolExecutor(_READERS, "pydist-store")
        for pool in (self._writer, self._readers):
            weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the entries that wait for being written."""
        return sum(entry.memory.nbytes for entry in list(self._leaving.values()))

    def put(self, sample: int, entry: Entry) -> None:
        """Writes an entry in the background; waits while two others wait for that."""
        self._leaving[sample] = entry
        while not self._room.acquire(timeout=1):
            if not self._works:
                return
        try:
            self._writer.submit(self._write, sample, entry)
        except RuntimeError:  # closed meanwhile, as the job has failed
            self._room.release()

    def find(self, sample: int) -> Entry | None:
        """Returns an entry; None if there is none, or it was lost."""
        entry = self._leaving.get(sample)
        if entry is not None or sample not in self.spill:
            return entry
        found = Entry(self._format_of(sample))
        try:
            nbytes = self.spill.read(sample, found.memory)
        except Exception as error:  # as of damage
            self.spill.forget(sample)
            self._count_lost()
            self._tell("read", f"{error}; the sample is read from the data set instead")
            return None
        with self._counting:
            self.read_bytes += nbytes
        return found

    def fetch(self, sample: int) -> Future[Entry | None] | None:
        """Starts reading an entry; returns None if it is not on disk, or still in memory too."""
        if sample in self._leaving or sample not in self.spill:
            return None
        return self._readers.submit(self.find, sample)

    def forget(self, sample: int) -> None:
        """Forgets an entry."""
        self._leaving.pop(sample, None)
        self.spill.forget(sample)

    def save(self, copies: list[HeldBlock]) -> None:
        """Makes what was written available to the next run, in the background.

        Args:
            copies: entries in memory that are written as well, as far as the limit allows; between
                those of `put`, which do not wait for them.
        """
        if self.spill.lasts and (self._saving is None or self._saving.done()):
            self._saving = Future()
            self._writer.submit(self._save_next, iter(copies), self._saving)

    def close(self, copies: list[HeldBlock] | None) -> None:
        """Stops all threads, and closes the files.

        Args:
            copies: as in `save`, which is done before; None to drop what is not saved yet.
        """
        if copies is not None:
            self._wait_for_save()
            self.save(copies)
            self._wait_for_save()
        self._works = False
        for pool in (self._readers, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)
        self._leaving.clear()
        self.spill.close()

    # -- the writing thread -----------------------------------------------------------------

    def _write(self, sample: int, entry: Entry) -> None:
        if self._leaving.get(sample) is entry:  # not forgotten meanwhile
            if not self._is_written(sample, entry):
                self._count_lost()
            if self._leaving.get(sample) is entry:
                del self._leaving[sample]
            else:  # forgotten meanwhile; another entry may wait in its place
                self.spill.forget(sample)
        self._room.release()

    def _is_written(self, sample: int, entry: Entry) -> bool:
        """Writes an entry that is not on disk yet; returns whether it is there now."""
        if sample in self.spill:
            return True
        try:
            if self._works and self.spill.nbytes + entry.memory.nbytes <= self._limit:
                self.spill.write(sample, entry.memory)
                return True
        except Exception as error:  # as of a full disk
            self._works = False
            self._tell("write", f"{error}; no more samples are written there")
        return False

    def _save_next(self, copies: Iterator[HeldBlock], saving: Future[None]) -> None:
        """Writes the next copy, if there is one, and comes back for the others."""
        for sample, entry in copies:
            if sample in self.spill or not entry.is_good:
                continue
            self._is_written(sample, entry)
            with contextlib.suppress(RuntimeError):  # closed meanwhile, as the job has failed
                self._writer.submit(self._save_next, copies, saving)
            return
        try:
            self.spill.publish()
        except Exception as error:
            self._tell("publish", f"{error}; the next run will not find these samples")
        saving.set_result(None)

    def _wait_for_save(self) -> None:
        """Waits until what is being saved was saved, with signs of life for the watchdog."""
        saving = self._saving
        while saving is not None and not saving.done():
            before = self.spill.nbytes
            with phase("writing samples to the local disk"):
                while not saving.done() and self.spill.nbytes == before:
                    wait([saving], timeout=1)

    def _count_lost(self) -> None:
        with self._counting:
            self.lost += 1

    def _tell(self, what: str, text: str) -> None:
        """Reports the first failure of a kind."""
        with self._counting:
            is_first = what not in self._has_warned
            self._has_warned.add(what)
        if is_first:
            self._warn(text)
