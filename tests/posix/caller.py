"""Program of test_torture.py: makes calls on files as it is told, and says what each returned.

Reads one JSON list of calls per line, and writes one JSON list of results. Every line begins in the
root (the argument) with no descriptor open.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

ROOT = sys.argv[1]
LIBC = ctypes.CDLL(None, use_errno=True)
for name in ("fopen", "opendir", "realpath"):
    getattr(LIBC, name).restype = ctypes.c_void_p
LIBC.telldir.restype = ctypes.c_long
LIBC.ftell.restype = ctypes.c_long
LIBC.realpath.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
LIBC.free.argtypes = [ctypes.c_void_p]


class Calls:
    """The calls, on descriptors in numbered slots."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.seen: dict[tuple[int, int], int] = {}

    def close_all(self) -> None:
        for slot in list(self.slots):
            self.close(slot)

    def _keep(self, slot: int, descriptor: int) -> None:
        self.close(slot)
        self.slots[slot] = descriptor

    def _at(self, slot: int | None) -> int | None:
        """A directory for calls with dir_fd."""
        return None if slot is None else self.slots.get(slot, 999)

    def _status(self, found: os.stat_result) -> list[Any]:
        # Inodes are compared by which calls see the same one.
        inode = self.seen.setdefault((found.st_dev, found.st_ino), len(self.seen))
        size = None if stat.S_ISDIR(found.st_mode) else found.st_size
        return [inode, found.st_mode, size, found.st_mtime_ns, found.st_uid, found.st_gid]

    def open(self, slot: int, path: str, flags: int, at: int | None) -> str:
        self._keep(slot, os.open(path, flags, 0o644, dir_fd=self._at(at)))
        return "open"

    def close(self, slot: int) -> str:
        if slot in self.slots:
            os.close(self.slots.pop(slot))
        return "closed"

    def read(self, slot: int, size: int) -> str:
        return os.read(self.slots[slot], size).hex()

    def readv(self, slot: int, size: int) -> list[Any]:
        parts = [bytearray(size), bytearray(7), bytearray(size)]
        return [os.readv(self.slots[slot], parts), *(part.hex() for part in parts)]

    def pread(self, slot: int, size: int, offset: int) -> str:
        return os.pread(self.slots[slot], size, offset).hex()

    def preadv(self, slot: int, size: int, offset: int) -> list[Any]:
        parts = [bytearray(size), bytearray(5)]
        return [os.preadv(self.slots[slot], parts, offset), *(part.hex() for part in parts)]

    def seek(self, slot: int, offset: int, whence: int) -> int:
        return os.lseek(self.slots[slot], offset, whence)

    def write(self, slot: int) -> int:
        return os.write(self.slots[slot], b"text")

    def fstat(self, slot: int) -> list[Any]:
        return self._status(os.fstat(self.slots[slot]))

    def dup(self, slot: int, to: int) -> str:
        self._keep(to, os.dup(self.slots[slot]))
        return "dup"

    def dup2(self, slot: int, to: int) -> str:
        if slot != to and slot in self.slots and to in self.slots:
            os.dup2(self.slots[slot], self.slots[to])
        return "dup2"

    def mode(self, slot: int) -> int:
        return fcntl.fcntl(self.slots[slot], fcntl.F_GETFL) & os.O_ACCMODE

    def map(self, slot: int, size: int, page: int, private: bool) -> str:
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
        offset = page * mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(self.slots[slot], size, access=access, offset=offset) as mapped:
            if private:
                mapped[0] = mapped[0] ^ 255
            return bytes(mapped).hex()

    def send(self, slot: int, size: int, offset: int | None) -> list[Any]:
        with tempfile.TemporaryFile() as out:
            sent = os.sendfile(out.fileno(), self.slots[slot], offset, size)
            out.seek(0)
            return [sent, out.read().hex()]

    def reopen(self, slot: int, to: int) -> str:
        self._keep(to, os.open(f"/proc/self/fd/{self.slots[slot]}", os.O_RDONLY))
        return "open"

    def link(self, slot: int) -> str:
        return os.readlink(f"/proc/self/fd/{self.slots[slot]}")

    def stat(self, path: str, at: int | None, follow: bool) -> list[Any]:
        return self._status(os.stat(path, dir_fd=self._at(at), follow_symlinks=follow))

    def access(self, path: str, wanted: int, at: int | None) -> bool:
        return os.access(path, wanted, dir_fd=self._at(at))

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def list_open(self, slot: int) -> list[str]:
        return sorted(os.listdir(self.slots[slot]))

    def scan(self, path: str) -> list[Any]:
        with os.scandir(path) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        return [
            [each.name, each.is_dir(), each.is_file(), each.inode() == each.stat().st_ino]
            for each in entries
        ]

    def seekdir(self, path: str, position: int) -> list[Any]:
        stream = LIBC.opendir(os.fsencode(path))
        if not stream:
            raise OSError(ctypes.get_errno(), "")
        stream = ctypes.c_void_p(stream)
        places = []
        while LIBC.readdir(stream):
            places.append(LIBC.telldir(stream))
        LIBC.rewinddir(stream)
        if position < len(places):
            LIBC.seekdir(stream, ctypes.c_long(places[position]))
        left = 0
        while LIBC.readdir(stream):
            left += 1
        LIBC.closedir(stream)
        return [len(places), left]

    def walk(self, path: str) -> list[Any]:
        return sorted([top, sorted(a), sorted(b)] for top, a, b in os.walk(path))

    def fwalk(self, path: str) -> list[Any]:
        return sorted([top, sorted(a), sorted(b)] for top, a, b, _ in os.fwalk(path))

    def chdir(self, path: str) -> str:
        os.chdir(path)
        return os.getcwd()

    def fchdir(self, slot: int) -> str:
        os.fchdir(self.slots[slot])
        return os.getcwd()

    def realpath(self, path: str) -> str:
        found = LIBC.realpath(os.fsencode(path), None)
        if not found:
            raise OSError(ctypes.get_errno(), "")
        text = os.fsdecode(ctypes.string_at(found))
        LIBC.free(found)
        return text

    def readlink(self, path: str) -> str:
        return os.readlink(path)

    def stream(self, path: str, mode: str, offset: int) -> list[Any]:
        opened = LIBC.fopen(os.fsencode(path), mode.encode())
        if not opened:
            raise OSError(ctypes.get_errno(), "")
        opened = ctypes.c_void_p(opened)
        room = ctypes.create_string_buffer(50)
        sought = LIBC.fseek(opened, ctypes.c_long(offset), 0)
        read = LIBC.fread(room, 1, 50, opened)
        rest = [LIBC.ftell(opened), LIBC.fseek(opened, ctypes.c_long(-3), 2), LIBC.getc(opened)]
        same = os.fstat(LIBC.fileno(opened)).st_ino == os.stat(path).st_ino
        LIBC.fclose(opened)
        return [sought, read, room.raw[:read].hex(), *rest, same]

    def file(self, path: str, mode: str) -> str:
        with open(path, mode) as opened:
            return str(opened.read())

    def child(self, slot: int) -> str:
        given = self.slots[slot]
        return subprocess.run(["cat"], stdin=given, stdout=-1, check=True).stdout.hex()

    def child_in(self, path: str) -> str:
        command = ["sh", "-c", "pwd -P; ls -a; cat f* ../f* 2>/dev/null | cksum"]
        return subprocess.run(command, cwd=path, stdout=-1, check=True).stdout.decode()

    def fork(self, slot: int, size: int) -> str:
        """The child reads; the position is shared."""
        given = self.slots[slot]
        child = os.fork()
        if child == 0:
            with contextlib.suppress(OSError):
                os.read(given, size)
            os._exit(0)
        os.waitpid(child, 0)
        return self.read(slot, size)

    def mkdir(self, path: str) -> str:
        os.mkdir(path)
        return "made"

    def symlink(self, path: str) -> str:
        os.symlink("somewhere", path)
        return "made"

    def unlink(self, path: str) -> str:
        os.unlink(path)
        return "gone"

    def rmdir(self, path: str) -> str:
        os.rmdir(path)
        return "gone"

    def rename(self, path: str, other: str) -> str:
        os.rename(path, other)
        return "renamed"

    def hardlink(self, path: str, other: str) -> str:
        os.link(path, other)
        return "linked"

    def truncate(self, path: str) -> str:
        os.truncate(path, 1)
        return "cut"

    def chmod(self, path: str) -> str:
        os.chmod(path, 0o600)
        return "changed"

    def utime(self, path: str) -> str:
        os.utime(path, ns=(1, 1))
        return "changed"

    def fchmod(self, slot: int) -> str:
        os.fchmod(self.slots[slot], 0o600)
        return "changed"


CHANGES = {
    "mkdir": 1, "symlink": 1, "unlink": 1, "rmdir": 1, "rename": 2, "hardlink": 2, "truncate": 1,
    "chmod": 1, "utime": 1, "chdir": 1,
}  # fmt: skip
"""Calls that change files or the current directory, and the number of their paths."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def stays_inside(name: str, given: list[Any]) -> bool:
    """Whether a call changes nothing outside of the root, which is read-only, and stays there."""
    paths = given[: CHANGES.get(name, 0)]
    if name == "stream" and not set(given[1]) <= set("rbe"):
        paths = given[:1]
    if name == "open" and given[2] & WRITING:
        paths = [given[1] if given[3] is None else "/"]
    whole = [os.path.abspath(os.path.join(os.getcwd(), path)) for path in paths]
    return all(f"{path}/".startswith(f"{ROOT}/") for path in whole)


OF_FILES = (
    "stream", "map", "send", "seek", "mode", "fchmod", "read", "readv", "pread", "preadv",
)  # fmt: skip
"""Calls that fail in another way on a directory of a pack, whose descriptor is of a path."""


def is_of_directory(calls: Calls, name: str, given: list[Any]) -> bool:
    place = given[0] if name == "stream" else calls.slots.get(given[0], -1)
    return name in OF_FILES and os.path.isdir(place)


def perform(function: Callable[..., Any], arguments: list[Any]) -> Any:
    try:
        return function(*arguments)
    except OSError as error:
        return f"error {errno.errorcode.get(error.errno or 0, error.errno)}"
    except (KeyError, ValueError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}"


def main() -> None:
    for line in sys.stdin:
        os.chdir(ROOT)
        calls = Calls()
        results = [
            perform(getattr(calls, name), given)
            if stays_inside(name, given) and not is_of_directory(calls, name, given)
            else "not called"
            for name, *given in json.loads(line)
        ]
        calls.close_all()
        os.chdir("/")
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
