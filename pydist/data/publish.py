"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from pydist import owner
from pydist.errors import DiskError, UsageError

GZIP_RATIO = 1040
"""More than gzip can pack."""
_SMALLEST_FILE = 512
"""Bytes on disk of a file that holds anything."""


def publish(path: Path, content: bytes | memoryview) -> None:
    """Writes a file atomically: under a temporary name, flushed to disk, then renamed.

    A reader, or a process that is killed, sees the old file or the new one, never a part.

    Args:
        path: the final name; an existing file is replaced.
        content: all of it.

    Raises:
        DiskError: the disk is full, or the folder can't be written.
    """
    need_space(path.parent, len(content))
    temporary = owner.temporary(path.with_name(f".{path.name}"))
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DiskError(
            f"{path}: could not write {len(content)} bytes: {error.strerror}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, unless it is there; raises `DiskError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise DiskError(f"{folder}: it is a file, and a folder is needed") from error
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}") from error


def real_path(path: str | Path) -> str:
    """A path without links, whether there is a file or not; raises `DiskError` if they circle."""
    try:
        Path(path).stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DiskError(f"{path}: {error.strerror}") from error
    return os.path.realpath(path)


def refuse_overwriting(inputs: Iterable[str | Path], output: str | Path) -> None:
    """Raises `UsageError` if an output is one of the files that it is made from."""
    if real_path(output) in map(real_path, inputs):
        raise UsageError(f"{output}: it would overwrite what it is made from; choose another place")


def need_space(folder: Path, size: int) -> None:
    """Raises `DiskError` if `folder` has not `size` bytes free, or takes no files."""
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}") from error
    if total == 0:  # /proc, and file systems that do not tell: whether it fits shows in writing
        _require_writable(folder)
    elif size > free:
        raise DiskError(f"{folder}: {size} bytes are needed and {free} are free")


def require_room(folder: Path, files: int, voxels: int, *, packed: bool) -> None:
    """Raises `DiskError` if a data set can't fit into a folder, before the work of hours.

    Args:
        folder: where the files go; what an earlier run has left there counts as written.
        files: how many.
        voxels: bytes of the voxels of each.
        packed: gzip is applied to them, so that only a lower bound is known.
    """
    size = files * (max(voxels // GZIP_RATIO, _SMALLEST_FILE) if packed else voxels)
    try:
        need_space(folder, size)
    except DiskError:
        with contextlib.suppress(FileNotFoundError):  # one that another process has removed
            size -= sum(path.lstat().st_size for path in folder.rglob("*"))
        need_space(folder, size)


def _require_writable(folder: Path) -> None:
    """Raises `DiskError` if no file can be made in a folder."""
    probe = owner.temporary(folder / ".pydist")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DiskError(f"{folder}: no files can be written there: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
