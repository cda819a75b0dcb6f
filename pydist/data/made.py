"""Records checksums of a data set's files when they are made, so that damage is detected.

A run that makes a data set may be interrupted and repeated, and keeps existing files. But a file
may have been damaged meanwhile, and a new checksum would include the damage. So each file's
checksum is recorded when it is made: first in a journal beside the files, then in the manifest. A
file without a recorded checksum, or with a different one, is made again.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from pathlib import Path

from pydist.data.manifest import Manifest
from pydist.data.publish import publish
from pydist.errors import DiskError
from pydist.parsing import parse_json

JOURNAL = ".made.jsonl"


class MadeFiles:
    """The files of a folder with the checksums recorded when they were made; thread-safe.

    Args:
        root: the folder.
        manifest: of the data set that the folder already holds, if any.
    """

    def __init__(self, root: Path, manifest: Manifest | None) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._checksums = {file.path: file.crc32 for file in manifest.files} if manifest else {}
        with contextlib.suppress(FileNotFoundError):
            for line in (root / JOURNAL).read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError):  # the last one may be cut short
                    name, checksum = parse_json(line)
                    self._checksums[name] = checksum

    def publish(self, name: str, content: bytes | memoryview) -> None:
        """Writes a file atomically, and records its checksum.

        Raises:
            DiskError: the disk is full, or the folder can't be written.
        """
        publish(self._root / name, content)
        line = json.dumps([name, checksum_of(content)])
        try:
            with self._lock, (self._root / JOURNAL).open("a", encoding="utf-8") as journal:
                journal.write(f"\n{line}\n")  # the first ends a line that was cut short
        except OSError as error:
            raise DiskError(f"{self._root / JOURNAL}: {error.strerror}") from error

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file that is unchanged since it was made, else `None`."""
        noted = self._checksums.get(name)
        if noted is None:
            return None
        try:
            content = (self._root / name).read_bytes()
        except OSError:
            return None
        return content if checksum_of(content) == noted else None

    def complete(self) -> None:
        """Removes the journal: the manifest has the checksums now."""
        with contextlib.suppress(OSError):
            (self._root / JOURNAL).unlink(missing_ok=True)


def checksum_of(content: bytes | memoryview) -> str:
    """Returns the CRC-32 of a content, in the form of manifests."""
    return f"{zlib.crc32(content):08x}"


def checksum_of_file(path: Path) -> tuple[int, str]:
    """Returns a file's size in bytes and its CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, f"{crc:08x}"
