"""Regular files in trusted places: pipes that block, links that lead elsewhere, files that change.

Opening a pipe would block forever, a link may lead out of the folder that the user trusts, and a
file that changes while it is open yields neither the old nor the new values.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydist.errors import DataError


def require_regular(path: Path) -> os.stat_result:
    """Returns the `stat` of a regular file.

    Raises:
        DataError: the path is missing, or is a folder, a pipe or a device.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file")
    return status


def open_regular(path: Path, flags: int) -> int:
    """Opens a regular file that a folder from anywhere may have: no link, pipe or device.

    Args:
        path: the file.
        flags: as for `os.open`.

    Returns:
        The descriptor, which the caller closes.

    Raises:
        OSError: it can't be opened, or is something else.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | safe, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


class Stamp(NamedTuple):
    """Identity and state of a file, which differ after it was replaced or changed."""

    bytes: int
    device: int
    inode: int
    changed: int
    """Time of the last change to its content, in ns."""

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Returns the stamp of a file from its `stat`."""
        return cls(status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns)


def change_since(path: Path, before: Stamp) -> str | None:
    """Describes how a file differs from its stamp, in one line; `None` for no change."""
    try:
        status = os.stat(path)  # noqa: PTH116  as fast as possible: each read of a block ends here
    except OSError as error:
        return f"{path}: lost while it was open: {error.strerror}"
    if before == (status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns):
        return None
    now = Stamp.of(status)
    if now.bytes != before.bytes:
        how = "shrank" if now.bytes < before.bytes else "grew"
        return f"{path}: {how} from {before.bytes} to {now.bytes} bytes while it was open"
    replaced = (now.device, now.inode) != (before.device, before.inode)
    return f"{path}: {'replaced by another file' if replaced else 'changed'} while it was open"


def first_change(stamps: Mapping[Path, Stamp]) -> str | None:
    """Describes how one of several files differs from its stamp; `None` for no change."""
    found = (change_since(path, stamp) for path, stamp in stamps.items())
    return next((each for each in found if each is not None), None)


class TrustedTree:
    """A folder that serves as one file of a data set; links may not lead out of it.

    A path below the folder on which there is no link is in it, so that the folder's own place is
    looked up only if there is one: each look-up is a message on a shared file system.

    Args:
        root: the folder.
        allow_roots: other folders to which links in it may lead.
    """

    def __init__(self, root: Path, allow_roots: Sequence[str | Path] = ()) -> None:
        self.root = root
        self._allow_roots = tuple(allow_roots)
        self._trusted = (root, *self._allow_roots)
        self._folders: set[str] = set()
        """Folders in the tree that are no links, or whose links were found to stay in it."""

    def inner(self, name: str) -> TrustedTree:
        """Returns the tree of a folder in this one; its links may lead wherever this one's may."""
        inner = TrustedTree(self.path(name), self._allow_roots)
        inner._trusted = self._trusted
        return inner

    def path(self, name: str) -> Path:
        """Returns the path of a file or folder in the tree, whether or not it exists.

        Args:
            name: its path relative to the root, with forward slashes.

        Raises:
            DataError: the name, or a link on the path, leads out of the tree.
        """
        path = self._in_known_folder(name)
        self._require_inside(path)
        return Path(path)

    def open(self, name: str) -> tuple[int, os.stat_result]:
        """Opens a regular file in the tree for reading.

        Returns:
            The descriptor, which the caller closes, and the file's `stat`.

        Raises:
            DataError: the name, or a link on the path, leads out of the tree; or it is no regular
                file.
            OSError: it can't be opened.
        """
        path = self._in_known_folder(name)
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self._require_inside(path)
            descriptor = os.open(os.path.realpath(path), flags)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise DataError(f"{path}: not a regular file")
        return descriptor, status

    def _in_known_folder(self, name: str) -> str:
        """Returns the path of a name, after all folders on it were found to be in the tree."""
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise DataError(f"{self.root}: {name!r} leads out of it, or is no name in it")
        path = str(self.root)
        for part in parts[:-1]:
            path = f"{path}/{part}"
            if path not in self._folders:
                self._require_inside(path)
                self._folders.add(path)
        return f"{path}/{parts[-1]}"

    def _require_inside(self, path: str) -> None:
        """Raises `DataError` if the last part of a path is a link that leads out of the tree."""
        if not os.path.islink(path):  # noqa: PTH114  each sample's file is looked up here
            return
        real = os.path.realpath(path)
        trusted = [os.path.realpath(root) for root in self._trusted]
        if not any(real == root or real.startswith(f"{root}{os.sep}") for root in trusted):
            allowed = ", ".join(map(str, self._allow_roots)) or "none"
            raise DataError(f"{path}: a link to {real}, outside allow_roots ({allowed})")
