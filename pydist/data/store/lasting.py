"""Blocks of a rank that stay on its disk for the next run, as a pack."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pydist import owner
from pydist._loader import native
from pydist.data.lock import FILE_NAME as LOCK_NAME
from pydist.data.lock import FolderLock
from pydist.data.publish import disk_errors, make_folder, publish
from pydist.data.store.options import StoreOptions
from pydist.data.store.spill import Spill
from pydist.errors import DataError, PydistError, UsageError
from pydist.parsing import parse_json

_PREFIX = "pydist-store-"
_SLOTS = 16
"""Runs of the same kind that may have a lasting spill in one folder at the same time."""

Warn = Callable[[str], None]


class LastingSpill(Spill):
    """Blocks on disk that the next run with the same facts finds.

    Args:
        folder: an existing folder, in which this spill makes one of its own.
        codec: compresses each block that gets smaller by it.
        item_size: bytes of one value, see `Spill`.
        facts: what must be the same in both runs, as JSON values.
        size_of: returns the bytes of a sample's block.
        limit: bytes of blocks; a spill of an earlier run that has more is removed.
        warn: is called with one line about each spill that can't be used.

    Raises:
        UsageError: too many runs with the same facts use the folder.
        DiskError: nothing can be written there.
    """

    lasts = True

    def __init__(
        self,
        folder: Path,
        codec: str,
        item_size: int,
        facts: dict[str, Any],
        size_of: Callable[[int], int],
        limit: int,
        warn: Warn,
    ) -> None:
        super().__init__(folder, codec, item_size)
        self._facts = json.loads(json.dumps(facts))
        self._sizes: list[int] = []
        self._temporary: Path | None = None
        self._is_published = True
        self._held = contextlib.ExitStack()
        try:
            self._lock = self._locked(folder)
            self._adopt(size_of, limit, warn)
        except BaseException:
            self._release()
            raise

    def publish(self) -> None:
        """Completes the file that is being written, and makes its blocks part of the pack.

        A run that is killed at any time leaves the pack as it was before, or the new one.

        Raises:
            DiskError: the disk is full, or the folder is lost.
        """
        if self._is_published:
            return
        if self._writer is not None and self._temporary is not None:
            size = self._writer.finish()
            with disk_errors(self.folder):
                self._temporary.replace(self.folder / native.partition_name(self._partition))
            self._sizes.append(size)
            self._partition += 1
            self._writer = None
        index = native.IndexWriter(0o700, 0)
        for sample, stored in self._stored():
            index.store(index.add(0, _name_of(sample), False, 0o600, 0), stored)
        self._lock.check()
        origin = json.dumps({"sample store": self._facts})
        publish(self.folder / native.PACK_INDEX, index.content(self._id, self._sizes, origin))
        self._is_published = True

    def close(self) -> None:
        """Closes the files, and releases the folder; blocks that were not published are lost.

        A folder without published blocks is removed.
        """
        super().close()
        with contextlib.suppress(OSError, PydistError):
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)
            self._lock.check()
            if not (self.folder / native.PACK_INDEX).exists():
                self._remove_all_but({LOCK_NAME})
        self._release()

    def _release(self) -> None:
        self._held.close()
        with contextlib.suppress(OSError):  # as it has blocks for the next run
            self.folder.rmdir()

    def _open(self) -> native.PartitionWriter:
        name = f".{native.partition_name(self._partition)}"
        self._temporary = owner.temporary(self.folder / name)
        return native.PartitionWriter(os.fsencode(self._temporary), self._partition, self._id)

    def _enter(
        self, sample: int, stored: native.PackedFile, read: Callable[[Tensor], None]
    ) -> None:
        super()._enter(sample, stored, read)
        self._is_published = False

    def forget(self, sample: int) -> None:
        """Forgets a block, also for the next run once this one publishes."""
        self._is_published &= sample not in self
        super().forget(sample)

    def _locked(self, folder: Path) -> FolderLock:
        """Locks the first folder for these facts that no other run uses."""
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16]
        for slot in range(_SLOTS):
            self.folder = folder / f"{_PREFIX}{digest}-{slot}"
            make_folder(self.folder)
            with disk_errors(self.folder):
                self.folder.chmod(0o700)  # also fails if it is another user's
            lock = FolderLock(self.folder)
            with contextlib.suppress(UsageError):
                self._held.enter_context(lock)
                return lock
        raise UsageError(f"{folder}: {_SLOTS} runs of this kind keep their blocks there")

    def _adopt(self, size_of: Callable[[int], int], limit: int, warn: Warn) -> None:
        """Takes the blocks of an earlier run; without a whole pack of them, removes its rest."""
        found = False
        if (self.folder / native.PACK_INDEX).exists():
            try:
                self._open_pack(size_of, limit)
                found = True
            except (DataError, OSError) as error:
                warn(f"{error}; the blocks of an earlier run are not used")
        if not found:
            self._records.clear()
            self._reads.clear()
            self._sizes, self._partition, self.nbytes, self.stored_bytes = [], 0, 0, 0
            self._id = os.urandom(16)
        self._is_published = True
        keep = {native.partition_name(part) for part in range(self._partition)}
        self._remove_all_but(keep | ({native.PACK_INDEX, LOCK_NAME} if found else {LOCK_NAME}))

    def _remove_all_but(self, keep: set[str]) -> None:
        """Removes partitions and indices with other names."""
        with disk_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name not in keep and path.name.lstrip(".").startswith(("part-", "index.")):
                    path.unlink()

    def _open_pack(self, size_of: Callable[[int], int], limit: int) -> None:
        pack = native.PackFolder(os.fsencode(self.folder))
        pack.check_index()
        if _parsed(pack.origin) != {"sample store": self._facts}:
            raise DataError(f"{self.folder}: a pack of other blocks")
        self._id = pack.id
        for part in range(pack.partitions):
            pack.check_partition(part)  # which also opens it
            self._sizes.append((self.folder / native.partition_name(part)).stat().st_size)
        self._partition = pack.partitions
        for entry in pack.children(0):
            sample = int(entry.name) if entry.name.isdigit() else -1
            known = 0 <= sample < self._facts["samples"] and not entry.is_directory
            if not known or entry.size != size_of(sample):
                raise DataError(f"{self.folder}: {entry.name!r} is no block of this data set")
            self._enter(sample, pack.stored(entry.number), partial(pack.read_into, entry.number))
        if self.nbytes > limit:
            raise DataError(
                f"{self.folder}: {self.nbytes:,} bytes of blocks, and {limit:,} allowed"
            )


def open_spill(
    options: StoreOptions,
    item_size: int,
    facts: Callable[[], dict[str, Any]],
    size_of: Callable[[int], int],
    warn: Warn,
) -> Spill:
    """Returns the files for the blocks of a rank, with those of an earlier run if it may have them.

    Args:
        options: of the store, with a disk.
        item_size: bytes of one value, see `Spill`.
        facts: returns what must be the same in both runs, see `LastingSpill`.
        size_of: returns the bytes of a sample's block.
        warn: is called with one line if no blocks can be taken from an earlier run, or left to the
            next one.

    Raises:
        NotSupported: the codec's library is missing.
    """
    native.require_codec(options.store_codec)
    folder = options.folder
    assert folder is not None
    try:
        make_folder(folder)
        for left in (folder, *folder.glob(f"{_PREFIX}*")):
            owner.remove_temporaries(left)  # of runs that were killed
        if options.store_reuse:
            return LastingSpill(
                folder, options.store_codec, item_size, facts(), size_of, options.disk, warn
            )
    except PydistError as error:  # without reuse, the first write says the same
        if options.store_reuse:
            warn(f"{error}; no blocks stay for the next run")
    return Spill(folder, options.store_codec, item_size)


def _parsed(text: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return parse_json(text)
    return None


def _name_of(sample: int) -> bytes:
    return b"%012d" % sample
