"""Records checksums of a data set's files when they are made, so that damage is detected.

A run that makes a data set may be interrupted and repeated, and keeps existing files. But a file
may have been damaged meanwhile, and a new checksum would include the damage. So each file's
checksum is recorded when it is made: first in a journal beside the files, then in the manifest. A
file without a recorded checksum, or with a different one, is made again.
"""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydist._loader import native
from pydist.data.data_file import checked_path, kind_of
from pydist.data.file_image import RECIPE
from pydist.data.journal import Journal
from pydist.data.manifest import FILE_NAME, Manifest
from pydist.data.publish import publish
from pydist.data.regular import Stamp, TrustedTree, require_regular
from pydist.data.safe_open import safe_open
from pydist.errors import DataError, UsageError
from pydist.owner import remove

JOURNAL = ".made.jsonl"
_OURS = ""
"""Name in the journal of the list of files that runs write and replace."""

_Update = Callable[[bytes | memoryview, int], int]
_UPDATES: dict[str, _Update] = {"crc32": zlib.crc32, "crc32c": native.crc32c}
"""By kind of checksum: continues one with more bytes."""


def present_set(root: Path, recipe: str, overwrite: bool) -> Manifest | None:
    """Checks that the folder may be written; returns the manifest of its present data set."""
    present = Manifest.load(root) if (root / FILE_NAME).exists() else None
    if present is not None and RECIPE not in present.origin:
        raise UsageError(
            f"{root / FILE_NAME} describes files that no run has made; choose another folder"
        )
    if present is not None and not overwrite and present.origin[RECIPE] != recipe:
        raise UsageError(
            f"{root} holds a data set that was made of other files or with other options; "
            "choose another folder, or overwrite (--overwrite) to replace it"
        )
    return present


class MadeFiles:
    """The files of a folder with the checksums recorded when they were made; thread-safe.

    Args:
        root: the folder.
        manifest: of the data set that the folder already holds, if any.
        names: of the files that this run writes.

    Raises:
        UsageError: one of them exists, and no run has made it.

    Attributes:
        journal: results of this run and of interrupted ones.
    """

    def __init__(self, root: Path, manifest: Manifest | None, names: Iterable[str]) -> None:
        self._root = root
        self.journal = Journal(root / JOURNAL)
        self._before = {file.path: file.checksum for file in manifest.files} if manifest else {}
        with contextlib.suppress(TypeError, ValueError):  # a journal that is damaged
            for name in self.journal.get(_OURS) or ():
                self._before.setdefault(checked_path(name), "")
        for name in sorted(set(names) - self._before.keys()):
            if self.journal.get(name) is None and os.path.lexists(root / name):
                raise UsageError(
                    f"{root / name} would be replaced, and no run has made it; choose another "
                    "folder, or remove it"
                )
            self._before[name] = ""
        self.journal.add(_OURS, sorted(self._before))

    def replace(self) -> None:
        """Removes the manifest, as another data set's files are to be overwritten.

        Thus an interrupted run leaves no manifest with files of two data sets.
        """
        (self._root / FILE_NAME).unlink(missing_ok=True)

    def publish(self, name: str, content: bytes | memoryview) -> None:
        """Writes a file atomically, and records its checksum.

        Raises:
            DiskError: the disk is full, or the folder can't be written.
        """
        publish(self._root / name, content)
        self.journal.add(name, checksum_of(content))

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file that is unchanged since it was made, else `None`."""
        noted = self.journal.get(name) or self._before.get(name)
        if not noted or not isinstance(noted, str):  # `convert_dataset` notes lists
            return None
        try:
            content = (self._root / name).read_bytes()
        except OSError:
            return None
        return content if checksum_of(content, kind_of(noted)) == noted else None

    def arrays(
        self, name: str, recipe: str, wanted: Sequence[str]
    ) -> tuple[bytes, list[Any]] | None:
        """Returns content and arrays of an unchanged HDF5 file with this recipe, else `None`.

        Args:
            name: of the file.
            recipe: its `RECIPE`.
            wanted: names of the arrays.
        """
        content = self.read(name)
        if content is None:
            return None
        with contextlib.suppress(DataError), safe_open(name, driver=io.BytesIO(content)) as file:
            if file.text(RECIPE) == recipe:
                return content, [file.dataset(each)[...] for each in wanted]
        return None

    def complete(self, manifest: Manifest) -> None:
        """Removes files of earlier data sets, and the journal: the manifest has the checksums."""
        remove_files(self._root, self._before.keys() - {file.path for file in manifest.files})
        self.journal.remove()


def remove_files(root: Path, names: Iterable[str]) -> None:
    """Removes files of a data set that are there, by names that its folder may have from anywhere.

    A name that leads out of the folder, also by a link, is ignored.

    Args:
        root: the data set's folder.
        names: paths relative to `root`, with forward slashes.
    """
    tree = TrustedTree(root)
    for name in names:
        with contextlib.suppress(DataError, ValueError):  # also names that no file can have
            path = tree.path(name)
            if os.path.lexists(path):
                remove(path)


def checksum_of(content: bytes | memoryview, kind: str = "crc32c") -> str:
    """Returns the checksum of a content, in the form of manifests.

    Args:
        content: any bytes.
        kind: "crc32c", or "crc32" as in manifests of version 1.
    """
    return _written(_UPDATES[kind](content, 0), kind)


def checksum_of_file(
    path: Path, kind: str = "crc32c", allow_roots: Sequence[str | Path] = ()
) -> tuple[int, str]:
    """Returns a file's size in bytes and its checksum.

    For a folder: the size of all files in it, and the checksum of their names and contents, in the
    order of the names; see `read_entries`.

    Args:
        path: the file or folder.
        kind: see `checksum_of`.
        allow_roots: folders outside of a folder to which links in it may lead.

    Raises:
        DataError: it is missing, or it is or holds no regular file.
        OSError: it can't be read.
    """
    update = _UPDATES[kind]
    if not path.is_dir():
        size, crc = _checksum(path, 0, update)
        return size, _written(crc, kind)
    size, crc = 0, 0
    for each in sorted(p for p in read_entries(path, allow_roots) if not p.is_dir()):
        crc = update(f"{each.relative_to(path).as_posix()}\0".encode(), crc)
        length, crc = _checksum(each, crc, update)
        size += length
    return size, _written(crc, kind)


def state_of(path: Path, allow_roots: Sequence[str | Path] = ()) -> list[int]:
    """Returns numbers that differ after a file, or a file in a folder, was changed."""
    if not path.is_dir():
        return list(Stamp.of(path.stat()))
    entries = read_entries(path, allow_roots)
    stamps = sorted(Stamp.of(each.stat() if each.exists() else each.lstat()) for each in entries)
    return [len(stamps), zlib.crc32(repr(stamps).encode())]


def read_entries(folder: Path, allow_roots: Sequence[str | Path] = ()) -> Iterator[Path]:
    """Yields what is below a folder, and below the folders to which its links may lead.

    Readers refuse other links, and what is below these is left out. So are second names of a
    folder, as links may form circles.

    Args:
        folder: the folder.
        allow_roots: folders outside of it to which links may lead.
    """
    tree = TrustedTree(folder, allow_roots)
    entered = {os.path.realpath(folder)}
    waiting = [folder]
    while waiting:
        try:
            inner = sorted(waiting.pop().iterdir())
        except PermissionError:  # readers report it, if they need it
            continue
        for path in inner:
            yield path
            if path.is_symlink() and path.is_dir():
                try:
                    tree.path(path.relative_to(folder).as_posix())
                except DataError:
                    continue
                if (real := os.path.realpath(path)) in entered:
                    continue
                entered.add(real)
            if path.is_dir():
                waiting.append(path)


def _checksum(path: Path, crc: int, update: _Update) -> tuple[int, int]:
    """Returns a file's size, and the checksum of what precedes it and its content."""
    require_regular(path)
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            size += len(piece)
            crc = update(piece, crc)
    return size, crc


def _written(crc: int, kind: str) -> str:
    return f"crc32c:{crc:08x}" if kind == "crc32c" else f"{crc:08x}"
