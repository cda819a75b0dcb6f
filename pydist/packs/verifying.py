"""Compares packs with their checksums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydist._loader import native
from pydist.data.lock import lock_if_writable
from pydist.errors import DataError, UsageError
from pydist.packs.servers import addresses, open_pack
from pydist.packs.staging import staged_partitions
from pydist.packs.tree import shown
from pydist.packs.writing import Progress, record_of

_PIECE = 1 << 22
"""Bytes on disk of files that one thread checks in turn."""
_FILES = 256
"""The most files of such a piece."""


def is_pack(folder: str | Path) -> bool:
    """Returns whether a folder has the index of a pack."""
    return Path(folder, native.PACK_INDEX).is_file()


def pack_outline(folder: str | Path) -> dict[str, Any]:
    """Returns what the index of a pack says, as plain values.

    Raises:
        DataError: the index is missing or damaged.
    """
    pack = open_pack(folder)
    pack.check_index()
    entries = [pack.entry(number) for number in pack.files(0)]
    options = record_of(pack).get("options")
    return {
        "folder": str(folder),
        "format": "pack",
        "files": len(entries),
        "folders": pack.entries - len(entries),
        "bytes": sum(entry.size for entry in entries),
        "stored_bytes": sum(entry.stored_size for entry in entries),
        "codecs": dict(sorted(Counter(entry.codec for entry in entries).items())),
        "partitions": pack.partitions,
        "partitions_here": sum(pack.is_here(each) for each in range(pack.partitions)),
        "options": options if isinstance(options, dict) else {},
    }


def verify(folder: str | Path, progress: Progress | None = None, *, workers: int = 1) -> list[str]:
    """Reads every file of a pack and compares all checksums: before and after compression.

    Of a folder that `stage` has filled, the partitions of other nodes are left out, unless servers
    give them.

    Args:
        folder: the pack's folder.
        progress: called after each file.
        workers: threads that read files.

    Returns:
        One line for each partition that is missing or not the index's, and for each file that is
        damaged; empty if there is none.

    Raises:
        DataError: the index is missing or damaged.
        UsageError: another process writes into the folder, or verifies it.
    """
    if workers < 1:
        raise UsageError(f"workers={workers}: at least 1")
    pack = open_pack(folder)
    pack.check_index()
    with lock_if_writable(Path(folder)):
        faults, bad = _partition_faults(pack, staged_partitions(folder))
        places = []
        for number in pack.files(0):
            entry = pack.entry(number)
            places.append((entry.partition, entry.offset, entry.stored_size, number))
        places.sort()  # files are read in the order of the disk
        total = sum(size for _, _, size, _ in places)
        done = sum(size for partition, _, size, _ in places if partition in bad)
        pieces = list(_pieces([place for place in places if place[0] not in bad]))
        with ThreadPoolExecutor(workers, "verify") as pool:
            try:
                for piece, found in zip(
                    pieces, pool.map(lambda piece: _file_faults(pack, piece), pieces), strict=True
                ):
                    faults += found
                    for size, number in piece:
                        done += size
                        if progress:
                            progress(done, total, shown(pack.path(number)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return faults


def _partition_faults(
    pack: native.PackFolder, staged: set[int] | None
) -> tuple[list[str], set[int]]:
    """Checks the headers of partitions.

    Args:
        pack: the pack.
        staged: partitions that the folder is to have, if not all.

    Returns:
        A line for each bad one, and the numbers of those whose files are not read.
    """
    faults, bad = [], set()
    for partition in range(pack.partitions):
        if not pack.is_here(partition) and partition not in (staged or ()):
            if addresses():
                continue  # its files come from a server
            if staged is not None:
                bad.add(partition)  # another node has it
                continue
        try:
            pack.check_partition(partition)
        except DataError as error:
            faults.append(str(error))
            bad.add(partition)
    return faults, bad


def _pieces(places: Sequence[tuple[int, int, int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Divides files into pieces for one thread each: bytes on disk and numbers of the files."""
    piece: list[tuple[int, int]] = []
    nbytes = 0
    for _, _, size, number in places:
        piece.append((size, number))
        nbytes += size
        if nbytes >= _PIECE or len(piece) == _FILES:
            yield piece
            piece, nbytes = [], 0
    if piece:
        yield piece


def _file_faults(pack: native.PackFolder, piece: Sequence[tuple[int, int]]) -> list[str]:
    faults = []
    for _, number in piece:
        try:
            pack.check_file(number)
        except DataError as error:
            faults.append(str(error))
    return faults
