"""Packs the files of a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydist import owner
from pydist._loader import native
from pydist.data.lock import FILE_NAME as LOCK_NAME
from pydist.data.lock import FolderLock
from pydist.data.publish import disk_errors, make_folder, need_space, publish, real_path
from pydist.errors import DataError, DiskError, UsageError
from pydist.launch.backends import cores
from pydist.packs.options import PackOptions
from pydist.packs.tree import SourceTree, shown
from pydist.parsing import byte_count, parse_json

MOST_PARTITIONS = 4096
"""A reader may have all of them open."""
LARGEST_ITEM = 255
"""Bytes of a value that blosc can sort."""

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in total, the latest file), from one thread at a time."""


def pack(
    source: str | Path,
    folder: str | Path,
    options: PackOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Packs all files and folders below `source`, with their modes and times.

    Partitions are written first and the index last, atomically, so a folder without an index is no
    pack. A run that was killed can be repeated; a pack of the same files and options is kept.

    Args:
        source: the folder to pack, which must not change meanwhile.
        folder: the folder of the pack: new, empty, or left by an earlier run.
        options: the options.
        progress: called after each file.

    Returns:
        The pack's origin: `options`, `tree` (SHA-256 of names, sizes and times), the numbers
        `files` and `folders`, and `bytes` before and `stored_bytes` after compression.

    Raises:
        DataError: the source is missing, changes, has no such folder as is to be broadcast, or has
            links that can't be packed, sockets or devices.
        UsageError: an option is out of range, the folder has other content, or another process
            writes there.
        NotSupported: the codec's library is missing.
        DiskError: not enough space, or the folder can't be written.
    """
    options = options or PackOptions()
    limit = _checked(options)
    root = Path(folder)
    inner, outer = Path(real_path(folder)), Path(real_path(source))
    if inner == outer or outer in inner.parents:
        raise UsageError(f"{folder}: inside of {source}, which is to be packed; choose another one")
    tree = SourceTree(source)
    shared = tree.below(options.broadcast)
    shared_size = sum(tree.nodes[number].size for number in shared)
    count = options.partitions or max(1, math.ceil((tree.size - shared_size) / limit))
    shared_count = max(1, math.ceil(shared_size / limit)) if shared else 0
    if count + shared_count > MOST_PARTITIONS:
        least = math.ceil(tree.size / (MOST_PARTITIONS - 1 if shared else MOST_PARTITIONS))
        better = "fewer" if options.partitions else f"partition_bytes of {least} or more"
        raise UsageError(
            f"{tree.size} bytes in {count + shared_count} partitions: at most {MOST_PARTITIONS}; "
            f"choose {better}"
        )
    make_folder(root)
    with FolderLock(root) as lock, disk_errors(root):
        recipe = {"options": _recorded(options), "tree": tree.digest()}
        origin = _earlier(root, recipe)
        if origin is not None:
            return origin
        if options.codec == "raw":
            need_space(root, tree.size)
        packing = _Packing(tree, root, options, progress)
        others = set(tree.files) - shared
        parts = packing.divided(others, count) + packing.divided(shared, shared_count)
        return packing.run(parts, recipe, lock)


def record_of(folder: native.PackFolder) -> dict[str, Any]:
    """Returns how a pack was made; empty if it does not say so."""
    with contextlib.suppress(ValueError):
        found = parse_json(folder.origin)
        if isinstance(found, dict):
            return found
    return {}


def _recorded(options: PackOptions) -> dict[str, Any]:
    """Returns the options that determine a pack; others are not recorded, as in older packs."""
    kept = asdict(options)
    if options.codec != "blosc":
        del kept["item_size"]
    folders = sorted({folder.strip("/") for folder in options.broadcast})
    del kept["broadcast"]
    return {**kept, "broadcast": folders} if folders else kept


def _checked(options: PackOptions) -> int:
    """Returns the bytes of a partition; raises an error for impossible options."""
    if options.order not in ("shuffled", "sorted"):
        raise UsageError(f"order={options.order!r}: shuffled or sorted")
    if not 0 <= options.seed < 1 << 64:
        raise UsageError(f"seed={options.seed}: a number from 0 to 2^64 - 1")
    if options.partitions is not None and not 1 <= options.partitions <= MOST_PARTITIONS:
        raise UsageError(f"partitions={options.partitions}: from 1 to {MOST_PARTITIONS}")
    if not 1 <= options.item_size <= LARGEST_ITEM:
        raise UsageError(f"item_size={options.item_size}: from 1 to {LARGEST_ITEM} bytes")
    if options.item_size > 1 and options.codec != "blosc":
        raise UsageError(f"item_size={options.item_size} with codec={options.codec!r}: for blosc")
    native.require_codec(options.codec)
    given = options.partition_bytes
    try:
        limit = byte_count(given) if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(f"partition_bytes={given!r}: {error}") from None
    if limit < 1:
        raise UsageError(f"partition_bytes={given}: at least 1")
    return limit


def _earlier(root: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the origin of the pack that a folder has, if it is of the same files and options.

    Without a pack, removes what an earlier run left.
    """
    owner.remove_temporaries(root)
    for pattern in (".part-*.pack.tmp-*", f".{native.PACK_INDEX}.tmp-*"):
        for path in root.glob(pattern):
            owner.remove(path)  # by whatever process: this one has the lock
    names = {path.name for path in root.iterdir()} - {LOCK_NAME}
    if native.PACK_INDEX in names:
        pack = native.PackFolder(os.fsencode(root))
        origin = record_of(pack)
        if {key: origin.get(key) for key in recipe} != recipe:
            raise UsageError(
                f"{root} has a pack of other files or with other options; choose another folder"
            )
        pack.check_index()
        for partition in range(pack.partitions):
            pack.check_partition(partition)
        return origin
    left = {native.partition_name(number) for number in range(MOST_PARTITIONS)}
    if names - left:
        raise UsageError(
            f"{root} has other files, such as {sorted(names - left)[0]!r}; choose an empty folder"
        )
    for name in names:
        (root / name).unlink()
    return None


def parts_by_bytes(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns the part of each file, in order; parts are within the largest file of equal sizes.

    Args:
        sizes: bytes of the files.
        parts: the number of parts.
    """
    total = max(sum(sizes), 1)
    before = 0
    part = []
    for size in sizes:
        part.append(min((2 * before + size) * parts // (2 * total), parts - 1))
        before += size
    return part


class _Packing:
    """Work that one call of `pack` does, with the folder locked."""

    def __init__(
        self, tree: SourceTree, root: Path, options: PackOptions, progress: Progress | None
    ) -> None:
        self._tree = tree
        self._root = root
        self._options = options
        self._progress = progress
        self._id = os.urandom(16)
        self._stored: dict[int, native.PackedFile] = {}
        self._done = 0
        self._reporting = threading.Lock()
        self._stopped = threading.Event()

    def run(
        self, parts: Sequence[Sequence[int]], recipe: dict[str, Any], lock: FolderLock
    ) -> dict[str, Any]:
        """Writes the pack with the files of each partition, and returns its origin."""
        finals = [self._root / native.partition_name(part) for part in range(len(parts))]
        temporaries = [owner.temporary(path.with_name(f".{path.name}")) for path in finals]
        try:
            written = self._write_all(parts, temporaries)
            origin = self._origin(recipe)
            index = self._index(written, json.dumps(origin))
            lock.check()
            for temporary, final in zip(temporaries, finals, strict=True):
                temporary.replace(final)
            publish(self._root / native.PACK_INDEX, index)
        finally:
            for temporary in temporaries:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        return origin

    def divided(self, files: Iterable[int], count: int) -> list[list[int]]:
        """Returns the files of each of `count` partitions."""
        parts: list[list[int]] = [[] for _ in range(count)]
        order = self._ordered(files)
        sizes = [self._tree.nodes[number].size for number in order]
        for number, part in zip(order, parts_by_bytes(sizes, count), strict=True):
            parts[part].append(number)
        return parts

    def _ordered(self, files: Iterable[int]) -> list[int]:
        """Returns files in the order of the partitions."""
        if self._options.order == "sorted":
            return sorted(files, key=self._tree.path)
        # By a hash of seed and path: the same order with every version of Python.
        seed = self._options.seed.to_bytes(8, "little")

        def key(number: int) -> bytes:
            return hashlib.blake2b(self._tree.path(number), key=seed, digest_size=16).digest()

        return sorted(files, key=key)

    def _write_all(self, parts: Sequence[Sequence[int]], files: Sequence[Path]) -> list[int]:
        """Writes all partitions, several at a time, and returns their sizes."""
        with ThreadPoolExecutor(min(cores(), len(parts))) as threads:
            try:
                return list(threads.map(self._write, range(len(parts)), parts, files))
            except BaseException:
                self._stopped.set()
                threads.shutdown(cancel_futures=True)
                raise

    def _write(self, part: int, members: Sequence[int], file: Path) -> int:
        """Writes one partition, and returns its size."""
        if self._stopped.is_set():
            return 0
        writer = native.PartitionWriter(os.fsencode(file), part, self._id)
        for number in members:
            if self._stopped.is_set():
                return 0
            path = self._tree.full_path(number)
            with _in_words(path), _opened(path) as source:
                self._require_unchanged(number, source)
                size = self._tree.nodes[number].size
                stored = writer.append(source, size, self._options.codec, self._options.item_size)
                self._require_unchanged(number, source)
            with self._reporting:
                self._stored[number] = stored
                self._done += size
                if self._progress:
                    self._progress(self._done, self._tree.size, shown(self._tree.path(number)))
        return writer.finish()

    def _require_unchanged(self, number: int, source: int) -> None:
        node, status = self._tree.nodes[number], os.fstat(source)
        found = (stat.S_ISREG(status.st_mode), status.st_size, status.st_mtime_ns)
        if found != (True, node.size, node.mtime_ns):
            raise DataError("it changed while it was packed")

    def _index(self, sizes: Sequence[int], origin: str) -> bytes:
        root = self._tree.nodes[0]
        writer = native.IndexWriter(root.mode, root.mtime_ns)
        for number, node in enumerate(self._tree.nodes[1:], 1):
            writer.add(node.parent, node.name, node.directory, node.mode, node.mtime_ns)
            if not node.directory:
                writer.store(number, self._stored[number])
        return writer.content(self._id, sizes, origin)

    def _origin(self, recipe: dict[str, Any]) -> dict[str, Any]:
        return {
            **recipe,
            "files": len(self._stored),
            "folders": len(self._tree.nodes) - len(self._stored),
            "bytes": self._tree.size,
            "stored_bytes": sum(stored.stored_size for stored in self._stored.values()),
        }


@contextlib.contextmanager
def _opened(path: bytes) -> Iterator[int]:
    # Not blocking: a pipe may have taken the file's place.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _in_words(path: bytes) -> Iterator[None]:
    """Names the file that is packed in errors of reading it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{shown(path)}: {error}") from error
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise DataError(f"{shown(path)}: {error.strerror}") from error
