"""Records checksums of a data set's files when they are made, so that damage is detected.

A run that makes a data set may be interrupted and repeated, and keeps existing files. But a file
may have been damaged meanwhile, and a new checksum would include the damage. So each file's
checksum is recorded when it is made: first in a journal beside the files, then in the manifest. A
file without a recorded checksum, or with a different one, is made again.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from pydist.data.journal import Journal
from pydist.data.manifest import Manifest
from pydist.data.publish import publish
from pydist.data.regular import Stamp, require_regular

JOURNAL = ".made.jsonl"


class MadeFiles:
    """The files of a folder with the checksums recorded when they were made; thread-safe.

    Args:
        root: the folder.
        manifest: of the data set that the folder already holds, if any.
    """

    def __init__(self, root: Path, manifest: Manifest | None) -> None:
        self._root = root
        self._journal = Journal(root / JOURNAL)
        self._before = {file.path: file.crc32 for file in manifest.files} if manifest else {}

    def publish(self, name: str, content: bytes | memoryview) -> None:
        """Writes a file atomically, and records its checksum.

        Raises:
            DiskError: the disk is full, or the folder can't be written.
        """
        publish(self._root / name, content)
        self._journal.add(name, checksum_of(content))

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file that is unchanged since it was made, else `None`."""
        noted = self._journal.get(name) or self._before.get(name)
        if noted is None:
            return None
        try:
            content = (self._root / name).read_bytes()
        except OSError:
            return None
        return content if checksum_of(content) == noted else None

    def complete(self) -> None:
        """Removes the journal: the manifest has the checksums now."""
        self._journal.remove()


def checksum_of(content: bytes | memoryview) -> str:
    """Returns the CRC-32 of a content, in the form of manifests."""
    return f"{zlib.crc32(content):08x}"


def checksum_of_file(path: Path) -> tuple[int, str]:
    """Returns a file's size in bytes and its CRC-32.

    For a folder: the size of all files in it, and the CRC-32 of their names and contents, in the
    order of the names.

    Raises:
        DataError: it is missing, or it is or holds no regular file.
        OSError: it can't be read.
    """
    if not path.is_dir():
        return _checksum(path, 0)
    size, crc = 0, 0
    for each in sorted(p for p in path.rglob("*") if not p.is_dir()):
        crc = zlib.crc32(f"{each.relative_to(path).as_posix()}\0".encode(), crc)
        length, checksum = _checksum(each, crc)
        size, crc = size + length, int(checksum, 16)
    return size, f"{crc:08x}"


def state_of(path: Path) -> list[int]:
    """Returns numbers that differ after a file, or a file in a folder, was changed."""
    if not path.is_dir():
        return list(Stamp.of(path.stat()))
    stamps = sorted(Stamp.of(each.lstat()) for each in path.rglob("*"))
    return [len(stamps), zlib.crc32(repr(stamps).encode())]


def _checksum(path: Path, crc: int) -> tuple[int, str]:
    """Returns a file's size, and the CRC-32 of what precedes it and its content."""
    require_regular(path)
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, f"{crc:08x}"
