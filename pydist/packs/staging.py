"""Copies the part of a pack that one node needs to a folder of the node: on its disk, or in memory.

Each partition belongs to one node or to several, and those with broadcast folders to all nodes.
Servers on the nodes (`pydist.packs.servers`) give readers the partitions of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydist import owner
from pydist._loader import native
from pydist.data.lock import FILE_NAME as LOCK_NAME
from pydist.data.lock import FolderLock
from pydist.data.publish import (
    disk_errors,
    flush_to_disk,
    make_folder,
    need_space,
    publish,
    real_path,
)
from pydist.errors import DataError, UsageError
from pydist.launch.backends import cores
from pydist.packs.tree import shown
from pydist.packs.writing import Progress, record_of
from pydist.parsing import parse_json

_WORK = ".staged"
"""Name of the folder for copies that are not complete, before the ending of temporary names."""
RECORD = "staged.json"
"""File that lists the partitions which a staged folder has, for `verify`."""
_PIECE = 8 << 20
"""Bytes that are copied at a time."""
_HEAD = 4096
"""First bytes of a partition that are compared: the header, with the pack's random id, and more."""


def stage(
    source: str | Path,
    folder: str | Path,
    node: int,
    nodes: int,
    *,
    copies: int = 1,
    broadcast: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[int]:
    """Copies the index of a pack, and the partitions of one node, to a folder of this node.

    Partition p belongs to the nodes (p + j) modulo `nodes`, for each j below `copies`. Partitions
    with files of broadcast folders belong to all nodes.

    Each file is compared with its checksums while it is copied. The index appears last, so an
    incomplete copy is no pack. A run that was killed can be repeated, and then copies what is
    missing. Partitions of the same pack that the folder has already stay.

    Args:
        source: the folder of the pack.
        folder: a folder on the node's disk or in its memory: new, empty, or left by an earlier run.
        node: number of this node, from 0.
        nodes: the number of nodes.
        copies: how many nodes each partition belongs to.
        broadcast: folders in the pack that all nodes need, besides those it was packed with.
        progress: called with the name of a partition, as it is copied.

    Returns:
        Numbers of the partitions that belong to this node.

    Raises:
        DataError: the pack is missing or damaged, or has no such folder.
        UsageError: an option is out of range, the folder has other content, or another process
            writes there.
        DiskError: not enough space, or the folder can't be written.
    """
    if nodes < 1:
        raise UsageError(f"nodes={nodes}: at least 1")
    if not 0 <= node < nodes:
        raise UsageError(f"node {node} of {nodes}: nodes are numbered from 0 to {nodes - 1}")
    if not 1 <= copies <= nodes:
        raise UsageError(f"copies={copies}: from 1 to {nodes}, the number of nodes")
    root = Path(folder)
    if Path(real_path(root)).is_relative_to(real_path(source)):
        raise UsageError(f"{folder}: it is in the pack that is to be copied; choose another folder")
    pack = native.PackFolder(os.fsencode(source))
    pack.check_index()
    chosen = {part for part in range(pack.partitions) if (node - part) % nodes < copies}
    for name in (*_recorded(pack), *broadcast):
        chosen |= {pack.entry(number).partition for number in _below(pack, source, name)}
    make_folder(root)
    with FolderLock(root) as lock, disk_errors(root):
        _Staging(pack, Path(source), root, progress).run(chosen, lock)
    return sorted(chosen)


def _recorded(pack: native.PackFolder) -> list[str]:
    """Returns the folders that a pack's record names for all nodes."""
    options = record_of(pack).get("options")
    folders = options.get("broadcast") if isinstance(options, dict) else None
    return [str(folder) for folder in folders] if isinstance(folders, list) else []


def _below(pack: native.PackFolder, source: str | Path, folder: str) -> list[int]:
    """Returns the files below a folder of a pack; raises `DataError` if there is no such folder."""
    path = folder.strip("/")
    found = None
    with contextlib.suppress(UnicodeEncodeError):  # no name in a record that a program made
        found = pack.find(os.fsencode(path)) if path else None
    if found is None or not pack.entry(found).is_directory:
        raise DataError(f"{source}: the pack has no folder {folder!r}")
    return pack.files(found)


class _Staging:
    """Work that one call of `stage` does, with the folder locked."""

    def __init__(
        self, pack: native.PackFolder, source: Path, root: Path, progress: Progress | None
    ) -> None:
        self._pack = pack
        self._source = source
        self._root = root
        self._progress = progress
        self._work = owner.temporary(root / _WORK)
        self._has_index = False
        self._total = 0
        self._done = 0
        self._reporting = threading.Lock()
        self._stopped = threading.Event()

    def run(self, chosen: set[int], lock: FolderLock) -> None:
        """Copies the chosen partitions that the folder lacks, and the index."""
        try:
            already = self._already()
            missing = sorted(chosen - already)
            if not missing and self._has_index:
                self._list(already)
                return
            sizes = {part: self._checked_size(part) for part in missing}
            index = self._size_of(native.PACK_INDEX)
            self._total = index + sum(sizes.values())
            need_space(self._root, self._total)
            self._work.mkdir()
            self._copy(native.PACK_INDEX, index)
            native.PackFolder(os.fsencode(self._work)).check_index()
            self._copy_all(sizes)
            flush_to_disk(self._work / native.PACK_INDEX)
            lock.check()
            self._list(chosen | already)
            (self._work / native.PACK_INDEX).replace(self._root / native.PACK_INDEX)
            flush_to_disk(self._root)
        finally:
            with contextlib.suppress(OSError):
                owner.remove(self._work)

    def _list(self, parts: set[int]) -> None:
        """Writes the list of partitions, if it is another one."""
        path, content = self._root / RECORD, json.dumps({"partitions": sorted(parts)}).encode()
        if not path.exists() or path.read_bytes() != content:
            publish(path, content)

    def _already(self) -> set[int]:
        """Returns the partitions that the folder has, and removes what killed runs left.

        Raises:
            UsageError: the folder has something else than this pack.
        """
        parts = {native.partition_name(part): part for part in range(self._pack.partitions)}
        already = set()
        for path in sorted(self._root.iterdir()):
            if path.name.startswith((f"{_WORK}.tmp-", f".{RECORD}.tmp-")):
                owner.remove(path)  # by whatever process: this one has the lock
            elif path.name in parts and path.is_file():
                # A partition gets its name when it is complete.
                if self._head(path) != self._head_of(path.name):
                    raise self._other_pack(path)
                already.add(parts[path.name])
            elif path.name == native.PACK_INDEX and path.is_file():
                self._has_index = self._is_our_index(path)
            elif path.name not in (LOCK_NAME, RECORD):
                raise UsageError(
                    f"{self._root} has other files, such as {path.name!r}; choose an empty folder"
                )
        return already

    def _is_our_index(self, path: Path) -> bool:
        """Returns whether an index is complete; raises `UsageError` if it is that of another pack.

        A damaged one is replaced in the end.
        """
        try:
            index = native.PackFolder(os.fsencode(self._root))
            index.check_index()
        except DataError:
            return False
        if index.id != self._pack.id:
            raise self._other_pack(path)
        return True

    def _other_pack(self, path: Path) -> UsageError:
        return UsageError(
            f"{self._root} has another pack than {self._source} ({path.name} differs); choose "
            "another folder"
        )

    @staticmethod
    def _head(path: Path) -> tuple[int, bytes]:
        """Returns the size and the first bytes of a file."""
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, file.read(_HEAD)

    def _head_of(self, name: str) -> tuple[int, bytes]:
        """Returns the size and the first bytes of a file of the pack."""
        with _reading(self._source / name):
            return self._head(self._source / name)

    def _size_of(self, name: str) -> int:
        """Returns the size of a file of the pack."""
        with _reading(self._source / name):
            return (self._source / name).stat().st_size

    def _checked_size(self, part: int) -> int:
        """Returns the size of a partition of the pack, once its header agrees with the index."""
        # Opened anew, as a pack keeps all of its partitions open.
        native.PackFolder(os.fsencode(self._source)).check_partition(part)
        return self._size_of(native.partition_name(part))

    def _copy_all(self, sizes: Mapping[int, int]) -> None:
        """Copies partitions, several at a time."""
        files: dict[int, list[tuple[int, int]]] = {part: [] for part in sizes}
        for number in self._pack.files(0):
            entry = self._pack.entry(number)
            if entry.partition in files:
                files[entry.partition].append((entry.offset, number))
        with ThreadPoolExecutor(max(1, min(cores(), len(sizes)))) as threads:
            try:
                each = [(part, sizes[part], sorted(files[part])) for part in sizes]
                list(threads.map(lambda what: self._copy_partition(*what), each))
            except BaseException:
                self._stopped.set()
                threads.shutdown(cancel_futures=True)
                raise

    def _copy_partition(self, part: int, size: int, files: Sequence[tuple[int, int]]) -> None:
        """Copies a partition, and moves it to its place once all of its files were compared."""
        name = native.partition_name(part)
        self._copy(name, size)
        copy = native.PackFolder(os.fsencode(self._work))
        for _, number in files:
            if self._stopped.is_set():
                return
            try:
                copy.check_file(number)
            except DataError as error:
                path = shown(self._pack.path(number))
                raise DataError(
                    f"{self._source / name}: damaged: {path} does not match its checksum"
                ) from error
        if self._stopped.is_set():
            return
        flush_to_disk(self._work / name)
        (self._work / name).replace(self._root / name)

    def _copy(self, name: str, size: int) -> None:
        """Copies a file of the pack into the folder for incomplete copies."""
        source = self._source / name
        with _reading(source):
            reads = source.open("rb", buffering=0)
        copied = 0
        with reads, (self._work / name).open("xb") as writes:
            while not self._stopped.is_set():
                with _reading(source):
                    piece = reads.read(_PIECE)
                if not piece:
                    break
                writes.write(piece)
                copied += len(piece)
                self._report(len(piece), name)
        if copied != size and not self._stopped.is_set():
            raise DataError(f"{source}: {copied} bytes of {size} could be read")

    def _report(self, size: int, name: str) -> None:
        with self._reporting:
            self._done += size
            if self._progress:
                self._progress(self._done, self._total, name)


def staged_partitions(folder: str | Path) -> set[int] | None:
    """Returns the partitions that `stage` has copied to a folder; None if it has not.

    Raises:
        DataError: their list is damaged.
    """
    path = Path(folder, RECORD)
    try:
        record = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    parts = record.get("partitions") if isinstance(record, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, int) for part in parts):
        raise DataError(f"{path}: no list of partitions; stage the pack again")
    return set(parts)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Names the file of the pack in errors of reading it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
