"""The lock that admits one writer to a folder: a training run, or a process that makes data.

A file in the folder names the writer. On its own machine `pydist.owner` knows for sure whether the
writer still runs, so the lock of a killed run never blocks the next one. The writer also holds the
file with `flock`, which detects a process in another container of the machine. A writer on another
machine is judged by its lease: it renews the file's time every `BEAT_SECONDS`, and counts as ended
if it did not do so for `LEASE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from pydist import owner
from pydist.errors import CheckpointError, DiskError, UsageError
from pydist.parsing import parse_json

FILE_NAME = ".pydist-lock"
BEAT_SECONDS = 5.0
LEASE_SECONDS = 60.0

_SETTLE_SECONDS = 0.2
"""Time in which another process that takes the same abandoned lock writes its name into it."""
_CREATION_SECONDS = 2.0
"""Time in which a process that has made the file writes its name into it."""
_LIMIT = 4096
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """A process that writes into a folder, as named by the lock file."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    tag: str = field(default_factory=owner.tag)
    kernel: str = field(default_factory=owner.kernel)
    began: float = field(default_factory=time.time)
    """Seconds since 1970, by its host's clock."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Distinguishes two locks of one process."""


class FolderLock:
    """Context manager that locks a folder for this process.

    Args:
        folder: an existing folder.

    Raises:
        UsageError: (on entering) another process writes into the folder; nothing is changed then.
        DiskError: (on entering) the folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / FILE_NAME
        self._holder = Holder()
        self._file = -1
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="pydist lock", daemon=True)

    def __enter__(self) -> FolderLock:
        try:
            self._file = self._taken()
        except OSError as error:
            if isinstance(error, DiskError):
                raise
            raise DiskError(f"can't write into {self.folder}: {error.strerror}") from error
        self._beating.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._holder.pid:
            return  # a fork of the process: the folder is its parent's
        self._over.set()
        self._beating.join()
        with contextlib.suppress(OSError):
            if self._holds():
                self._path.unlink()
        os.close(self._file)

    def check(self) -> None:
        """Raises `CheckpointError` if this process has lost the folder.

        This happens if it was stopped for longer than its lease, or if the lock was deleted.
        """
        if self._holds():
            return
        other = _read(self._path)
        who = "its lock was deleted" if other is None else f"{_shown(other)} took it"
        raise CheckpointError(f"{self.folder} no longer belongs to this run: {who}")

    def _taken(self) -> int:
        """Acquires the lock, and returns the open lock file that names this process."""
        while True:
            file, new = _open(self._path)
            taken = False
            try:
                free = _flock(file)
                # A file that was deleted meanwhile is no longer a lock.
                if new or (_is_at(file, self._path) and self._may_take(free)):
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps(asdict(self._holder)).encode(), 0)
                    if not new:
                        time.sleep(_SETTLE_SECONDS)
                    taken = self._holds()
                if taken:
                    return file
            except OSError:
                if new:
                    with contextlib.suppress(OSError):
                        self._path.unlink()
                raise
            finally:
                if not taken:
                    os.close(file)

    def _may_take(self, free: bool | None) -> bool:
        """Returns True if the holder that the file names has ended; else raises `UsageError`.

        Args:
            free: whether no other process has the file locked; None if unknown.
        """
        other = self._named()
        if other is None:
            if free is False:
                raise UsageError(f"{self.folder} is in use by another process")
            return True
        runs = owner.is_running(other.tag)
        if runs is None and free is not None and (not free or other.kernel == owner.kernel()):
            runs = not free
        if runs is None:
            runs = self._renewed(other)
        if runs:
            raise UsageError(
                f"{self.folder} is in use: {_shown(other)} writes there; wait until it ends, or "
                "choose another folder"
            )
        return True

    def _named(self) -> Holder | None:
        """Returns the holder of the lock; None if the file's maker never wrote its name."""
        for _ in range(20):
            other = _read(self._path)
            if other is not None or not self._path.exists():
                return other
            time.sleep(_CREATION_SECONDS / 20)
        return None

    def _renewed(self, other: Holder) -> bool:
        """Returns whether a holder on another machine renews its lease; waits until it is over."""
        began = _renewal(self._path)
        # By the file system's clock: the other machine's may be fast or slow.
        probe = owner.temporary(self._path)
        probe.touch()
        age = probe.stat().st_mtime - began
        probe.unlink()
        left = LEASE_SECONDS - max(age, 0.0)
        if left > 0:
            sys.stderr.write(
                f"pydist: {self.folder} was in use by {_shown(other)}; waiting up to {left:.0f} s "
                "to see whether it still is\n"
            )
        deadline = time.monotonic() + left
        while time.monotonic() < deadline:
            time.sleep(min(BEAT_SECONDS / 5, left))
            now = _read(self._path)
            if now != other:
                return now is not None
            if _renewal(self._path) != began:
                return True
        return False

    def _holds(self) -> bool:
        return _read(self._path) == self._holder

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                if self._holds():
                    os.utime(self._path)


@contextlib.contextmanager
def lock_if_writable(folder: Path) -> Iterator[None]:
    """Locks a folder for this process while it is read, unless it can't be written.

    Raises:
        UsageError: another process writes into the folder.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(DiskError):
            stack.enter_context(FolderLock(folder))
        yield


def writer_of(folder: Path) -> str | None:
    """Describes the process that writes into a folder; None if none does. Changes nothing."""
    path = folder / FILE_NAME
    holder = _read(path)
    if holder is None:
        return None
    runs = owner.is_running(holder.tag)
    if runs is None:  # on another machine: by its lease, whose clock may differ a little
        runs = time.time() - _renewal(path) < LEASE_SECONDS
    return _shown(holder) if runs else None


def _open(path: Path) -> tuple[int, bool]:
    """Opens the lock file; returns its descriptor and whether this call made it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags), False


def _flock(file: int) -> bool | None:
    """Locks an open file; False if another process holds it, None without support for locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _is_at(file: int, path: Path) -> bool:
    """Returns whether an open file is the one at a path now."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _read(path: Path) -> Holder | None:
    """Returns the holder that the lock file names; None without a file or a valid name."""
    try:
        with path.open("rb") as file:
            record = parse_json(file.read(_LIMIT))
        if not math.isfinite(record["began"]):
            return None
        return Holder(
            host=str(record["host"]),
            pid=int(record["pid"]),
            tag=str(record["tag"]),
            kernel=str(record["kernel"]),
            began=float(record["began"]),
            token=str(record["token"]),
        )
    except (OSError, ValueError, TypeError, LookupError, OverflowError):
        return None


def _renewal(path: Path) -> float:
    """Returns the time of the last renewal; reopens the file, as network file systems cache it."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _shown(holder: Holder) -> str:
    """Formats a holder's process, host and age."""
    seconds = max(0, round(time.time() - holder.began))
    steps = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next(step for step in steps if seconds >= step[0] or step[0] == 1)
    host = "".join(c if c.isprintable() else "?" for c in holder.host[:64])
    return f"process {holder.pid} on {host} (started {seconds // size} {unit} ago)"
