"""Scans a folder for packing: its files and folders, in the order of an index."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydist.errors import DataError

_KINDS = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class Node:
    """A file or a folder as it was found.

    Attributes:
        parent: number of its folder.
        name: base name, as bytes of the file system; empty for the root.
        directory: whether it is a folder.
        mode: permission bits.
        mtime_ns: time of its last change in nanoseconds since 1970.
        size: bytes of a file.
    """

    parent: int
    name: bytes
    directory: bool
    mode: int
    mtime_ns: int
    size: int


class SourceTree:
    """Files and folders that are below a folder, in breadth-first order and sorted by name.

    Symbolic links to files inside the folder are those files.

    Args:
        root: the folder.

    Attributes:
        nodes: all of them; the first one is the root.
        files: numbers of the files among the nodes.
        size: bytes of all files.

    Raises:
        DataError: the folder can't be read, or has something else than files and folders.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = os.path.realpath(os.fsencode(root))
        try:
            status = os.stat(self._root)  # noqa: PTH116  Path takes no bytes
        except OSError as error:
            raise DataError(f"{root}: {error.strerror}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise DataError(f"{root}: not a folder")
        self.nodes = [_node(0, b"", status)]
        waiting = deque([(0, self._root)])
        while waiting:
            number, folder = waiting.popleft()
            for name, status in self._listed(folder):
                if stat.S_ISDIR(status.st_mode):
                    waiting.append((len(self.nodes), os.path.join(folder, name)))  # noqa: PTH118  Path takes no bytes
                self.nodes.append(_node(number, name, status))
        self.files = [number for number, node in enumerate(self.nodes) if not node.directory]
        self.size = sum(node.size for node in self.nodes)

    def path(self, number: int) -> bytes:
        """Returns the path of a file or folder relative to the root, which is empty."""
        names: list[bytes] = []
        while number:
            names.append(self.nodes[number].name)
            number = self.nodes[number].parent
        return b"/".join(reversed(names))

    def full_path(self, number: int) -> bytes:
        """Returns the absolute path of a file or folder."""
        return os.path.join(self._root, self.path(number))  # noqa: PTH118  Path takes no bytes

    def below(self, folders: Iterable[str]) -> set[int]:
        """Returns the files below folders; raises `DataError` if one of them is not there."""
        wanted = {os.fsencode(folder.strip("/")): folder for folder in folders}
        inside = [False] * len(self.nodes)
        for number, node in enumerate(self.nodes[1:], 1):  # folders come before what is in them
            named = bool(wanted) and node.directory and self.path(number) in wanted
            if named:
                del wanted[self.path(number)]
            inside[number] = named or inside[node.parent]
        for folder in wanted.values():
            raise DataError(f"{shown(self._root)}: no folder {folder!r} in it")
        return {number for number in self.files if inside[number]}

    def digest(self) -> str:
        """Returns the SHA-256 of all that was found: names, kinds, modes, times and sizes."""
        found = hashlib.sha256()
        for node in self.nodes:
            fields = (node.parent, node.directory, node.mode, node.mtime_ns, node.size)
            found.update(b"%d %d %d %d %d " % fields)
            found.update(node.name + b"\0")
        return found.hexdigest()

    def _listed(self, folder: bytes) -> Sequence[tuple[bytes, os.stat_result]]:
        """Returns the names in a folder, sorted, with their status."""
        try:
            with os.scandir(folder) as entries:
                return [(entry.name, self._status(entry)) for entry in sorted(entries, key=_name)]
        except OSError as error:
            where = folder if error.filename is None else os.fsencode(error.filename)
            raise DataError(f"{shown(where)}: {error.strerror}") from error

    def _status(self, entry: os.DirEntry[bytes]) -> os.stat_result:
        """Returns the status of a file or folder; raises `DataError` for anything else."""
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            return self._target(entry)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is not None:
            raise DataError(f"{shown(entry.path)}: {kind}; a pack has files and folders alone")
        return status

    def _target(self, entry: os.DirEntry[bytes]) -> os.stat_result:
        """Returns the status of the file inside the root to which a symbolic link leads."""
        link = f"{shown(entry.path)}: a symbolic link"
        try:
            target, status = os.path.realpath(entry.path), entry.stat()
        except OSError as error:
            raise DataError(f"{link} that leads nowhere ({error.strerror})") from error
        if not target.startswith(os.path.join(self._root, b"")):  # noqa: PTH118  Path takes no bytes
            raise DataError(f"{link} out of the folder, to {shown(target)}; copy what it leads to")
        if not stat.S_ISREG(status.st_mode):
            raise DataError(
                f"{link} to what is not a file, {shown(target)}; links to files can be packed"
            )
        return status


def shown(path: bytes) -> str:
    """Returns a path as one line of text, whatever its bytes are."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _name(entry: os.DirEntry[bytes]) -> bytes:
    return entry.name


def _node(parent: int, name: bytes, status: os.stat_result) -> Node:
    directory = stat.S_ISDIR(status.st_mode)
    return Node(
        parent=parent,
        name=name,
        directory=directory,
        mode=stat.S_IMODE(status.st_mode),
        mtime_ns=status.st_mtime_ns,
        size=0 if directory else status.st_size,
    )
