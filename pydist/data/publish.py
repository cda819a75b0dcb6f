"""Writes files atomically, and checks the space for them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from pydist import owner
from pydist.errors import DiskError, UsageError

GZIP_RATIO = 1040
"""Upper bound of gzip's compression ratio."""
_SYNCED = 16
"""Files that are flushed to disk at the same time."""
_FULL = 1 << 16
"""A disk with fewer bytes free counts as full, where a failed write does not say why."""
_SMALLEST_FILE = 512
"""Least bytes on disk of a file that is not empty."""


def publish(path: Path, content: bytes | memoryview) -> None:
    """Writes a file atomically: under a temporary name, flushed to disk, then renamed.

    A reader sees the old file or the new one, never a part, also if this process is killed.

    Args:
        path: the final name; an existing file is replaced.
        content: the file's bytes.

    Raises:
        DiskError: the disk is full, or the folder can't be written.
    """
    with publishing(path, len(content)) as file:
        file.write(content)


@contextlib.contextmanager
def publishing(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Opens a file that appears, complete, when the `with` block has ended without an error.

    Args:
        path: the final name; an existing file is replaced.
        size: the least bytes that the file will have.

    Raises:
        DiskError: the disk is full, or the folder can't be written.
    """
    need_space(path.parent, size)
    temporary = owner.temporary(path.with_name(f".{path.name}"))
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_to_disk(path.parent)
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(f"{path}: could not write {size} bytes: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raises errors of the file system as a `DiskError` that names the folder."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}") from error


def publish_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder atomically, as `replace_folder` does, and makes the folders above it.

    Raises:
        DiskError: the disk is full, or the folder can't be written.
    """
    make_folder(path.parent)
    try:
        replace_folder(path, fill)
    except OSError as error:
        raise DiskError(f"{path}: could not be written: {reason_of(error, path.parent)}") from error


def replace_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder atomically: under a temporary name, flushed to disk, then renamed.

    Args:
        path: the final name; an existing folder is replaced, at one instant where the system can.
        fill: writes the content into an empty folder.

    Raises:
        OSError: the disk is full, or the folder can't be written.
    """
    temporary = owner.temporary(path.with_name(f".{path.name}"))
    try:
        temporary.mkdir()
        fill(temporary)
        written = [temporary, *temporary.rglob("*")]
        with ThreadPoolExecutor(_SYNCED) as pool:  # file systems flush several at once
            list(pool.map(flush_to_disk, written))
        if path.exists():  # a folder can't replace one that has content
            _exchange(temporary, path)
        else:
            temporary.replace(path)
        flush_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges two folders: atomically where the system can, else by renaming them in turn."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is not None:
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
            return
    aside = owner.temporary(other.with_name(f".{other.name}"))
    other.rename(aside)
    try:
        one.rename(other)
    except OSError:
        aside.rename(other)
        raise
    aside.rename(one)


def reason_of(error: OSError, folder: Path) -> str:
    """Returns why a write into a folder has failed, with the free space of a full disk."""
    reason = error.strerror or str(error)  # NumPy's errors have a text alone
    if error.errno not in (None, errno.ENOSPC):
        return reason
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return reason
    if error.errno is None and free >= _FULL:
        return reason
    return f"{os.strerror(errno.ENOSPC)}; {free / 1e6:.1f} MB are free"


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents unless they exist; raises `DiskError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise DiskError(f"{folder}: it is a file, and a folder is needed") from error
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}") from error


def real_path(path: str | Path) -> str:
    """Resolves the links of a path, which need not exist; raises `DiskError` for a circle."""
    try:
        Path(path).stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DiskError(f"{path}: {error.strerror}") from error
    return os.path.realpath(path)


def refuse_overwriting(inputs: Iterable[str | Path], output: str | Path) -> None:
    """Raises `UsageError` if an output is one of the inputs."""
    if real_path(output) in map(real_path, inputs):
        raise UsageError(f"{output}: it would overwrite what is read; choose another place")


def need_space(folder: Path, size: int) -> None:
    """Raises `DiskError` if `folder` has less than `size` bytes free, or accepts no files."""
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}") from error
    if total == 0:  # /proc, and file systems that do not report it: only writing can show
        _require_writable(folder)
    elif size > free:
        raise DiskError(f"{folder}: {size} bytes are needed and {free} are free")


def require_room(folder: Path, files: int, voxels: int, *, packed: bool) -> None:
    """Raises `DiskError` if a data set can't fit into a folder, before hours of work.

    Args:
        folder: the destination; files of an earlier run count as written.
        files: the number of files.
        voxels: bytes of the voxels per file.
        packed: the voxels are compressed by gzip, so that only a lower bound is known.
    """
    size = files * (max(voxels // GZIP_RATIO, _SMALLEST_FILE) if packed else voxels)
    try:
        need_space(folder, size)
    except DiskError:
        with contextlib.suppress(FileNotFoundError):  # another process may remove files
            size -= sum(path.lstat().st_size for path in folder.rglob("*"))
        need_space(folder, size)


def _require_writable(folder: Path) -> None:
    """Raises `DiskError` unless files can be made in a folder."""
    probe = owner.temporary(folder / ".pydist")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DiskError(f"{folder}: no files can be written there: {error.strerror}") from error


def flush_to_disk(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
