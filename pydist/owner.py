"""Which process made a file, and whether that process still runs.

Locks, temporary files and private directories carry the tag of the process that made them. A tag
names the process for good: process ids are used again, so its start time is part of the tag, and
they differ between machines, restarts and containers, so these are part of it too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import socket
import sys
import time
import uuid
from pathlib import Path

FOREIGN_AGE = 86_400.0
"""Seconds without a change after which a temporary file of an unknown process is abandoned: one of
another machine or container, or one that carries no tag."""

_TAG = re.compile(r"([0-9a-f]{8})-([0-9a-z]{1,8})-([0-9a-z]{1,10})")
_TEMPORARY = re.compile(
    r".+\.tmp-(?:(?P<tag>[0-9a-f]{8}-[0-9a-z]+-[0-9a-z]+)-[0-9a-f]{8}|[0-9a-f]{12}|[0-9a-f]{32})"
)
"""With a tag, or as pydist named them before there were tags."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@functools.cache
def kernel() -> str:
    """The running kernel: another machine has another, and so has this one after a restart."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}-{sys.platform}"


@functools.cache
def _realm() -> str:
    """The set of processes whose ids mean the same as here: one kernel, one pid namespace."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{kernel()} {namespace}".encode()).hexdigest()[:8]


def tag() -> str:
    """The tag of this process: at most 28 letters, digits and hyphens."""
    return _tag_of(os.getpid())  # a fork is another process


def runs(owner: str) -> bool | None:
    """Whether the process with a tag runs.

    Args:
        owner: see `tag`.

    Returns:
        True or False; None where this process can't know it: the other one belongs to another
        machine, to another container, or to the time before this machine's restart.
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
        pass  # it runs, for another user
    found = _start_of(pid)
    return found is None or found == started


def temporary(path: Path) -> Path:
    """A name beside `path` for what is not complete yet; `remove_temporaries` knows it."""
    return path.with_name(f"{path.name}.tmp-{tag()}-{uuid.uuid4().hex[:8]}")


def remove_temporaries(folder: Path) -> list[Path]:
    """Removes the temporary files and folders in a folder that dead processes left there.

    Those of processes that run stay. Those of unknown processes stay until nothing has changed
    them for a day.

    Args:
        folder: not searched deeper; it need not exist.

    Returns:
        What was removed.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match is not None and _abandoned(path, match["tag"]):
                with contextlib.suppress(OSError):
                    remove(path)
                    removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Removes a file, a link (not what it leads to), or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _abandoned(path: Path, owner: str | None) -> bool:
    alive = None if owner is None else runs(owner)
    if alive is not None:
        return not alive
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime > FOREIGN_AGE
    return False


@functools.cache
def _tag_of(pid: int) -> str:
    return f"{_realm()}-{_base36(pid)}-{_base36(_start_of(pid) or 0)}"


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks after the kernel did; 0 if it has ended, None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # no such file system, or the process is hidden from this user
    fields = text.rpartition(")")[2].split()
    # A process that was killed stays in the table as long as its parent does not ask for it.
    return 0 if fields[0] in "ZX" else int(fields[19])


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"
