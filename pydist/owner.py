"""Tags that identify the process that made a file, and whether that process still runs.

Locks, temporary files and private directories carry the tag of the process that made them. A tag
is unique: process ids are reused, so it includes the start time, and they are only valid on one
machine, until its restart, and in one container, so it includes these too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import socket
import stat
import sys
import time
import uuid
from pathlib import Path

FOREIGN_AGE = 86_400.0
"""Seconds without a change after which a temporary file of an unknown process is abandoned: of
another machine or container."""

_TAG = re.compile(r"([0-9a-f]{8})-([0-9a-z]{1,8})-([0-9a-z]{1,10})")
_TEMPORARY = re.compile(r".+\.tmp-([0-9a-f]{8}-[0-9a-z]+-[0-9a-z]+)-[0-9a-f]{8}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@functools.cache
def kernel() -> str:
    """Returns the id of the running kernel, which differs between machines and restarts."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}-{sys.platform}"


@functools.cache
def _realm() -> str:
    """Returns the id of this kernel and pid namespace, in which process ids are comparable."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{kernel()} {namespace}".encode()).hexdigest()[:8]


def tag() -> str:
    """Returns the tag of this process: at most 28 letters, digits and hyphens."""
    return _tag_of(os.getpid())  # a fork is another process


def is_running(owner: str) -> bool | None:
    """Returns whether the process with a tag runs.

    Args:
        owner: see `tag`.

    Returns:
        True or False; None if this is unknown, as the process belongs to another machine or
        container, or to the time before this machine's restart.
    """
    match = _TAG.fullmatch(owner)
    if match is None or match[1] != _realm():
        return None
    pid, started = int(match[2], 36), int(match[3], 36)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # the process runs, for another user
    found = _start_of(pid)
    return found is None or found == started


def temporary(path: Path) -> Path:
    """Returns a temporary name next to `path`, which `remove_temporaries` recognizes."""
    return path.with_name(f"{path.name}.tmp-{tag()}-{uuid.uuid4().hex[:8]}")


def remove_temporaries(folder: Path) -> list[Path]:
    """Removes the temporary files and folders that dead processes left in a folder.

    Files of running processes stay. Files of unknown processes stay until they have not changed
    for a day.

    Args:
        folder: the folder, without subfolders; it need not exist.

    Returns:
        The removed paths.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match is not None and _abandoned(path, match[1]):
                with contextlib.suppress(OSError):
                    remove(path)
                    removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Removes a file, a link (not its target), or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_private_folder(path: Path) -> None:
    """Makes a folder unless it exists, in which other users can't put or replace anything.

    Raises:
        PermissionError: it exists, and is not a folder of this user alone.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder of this user alone")


def stat_of(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; empty without such a process."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []


def _abandoned(path: Path, owner: str) -> bool:
    alive = is_running(owner)
    if alive is not None:
        return not alive
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime > FOREIGN_AGE
    return False


@functools.cache
def _tag_of(pid: int) -> str:
    return f"{_realm()}-{_base36(pid)}-{_base36(_start_of(pid) or 0)}"


def _start_of(pid: int) -> int | None:
    """Returns a process's start, in ticks after the kernel's; 0 if ended, None if unknown."""
    fields = stat_of(pid)
    if not fields:
        return None  # no such file system, or the process is hidden from this user
    # A killed process stays in the table until its parent waits for it.
    return 0 if fields[0] in "ZX" else int(fields[19])


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"
