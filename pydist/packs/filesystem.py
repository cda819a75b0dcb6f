"""Gives fsspec the file system of a pack: `pydist://FOLDER/path`, or `PackFileSystem(FOLDER)`."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import io
import os
import stat
from pathlib import Path
from typing import IO, Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractFileSystem
from fsspec.utils import stringify_path, tokenize
from typing_extensions import Buffer

from pydist._loader import native
from pydist.data.regular import Stamp
from pydist.errors import DataError, UsageError
from pydist.packs.servers import SECRET, SERVERS, open_pack

_PREFIX = "pydist://"
_READ_WHOLE = 1 << 20
"""Files of up to this size are read when they are opened, and compared with their checksum."""
_OPEN = 16
"""Packs that stay open after their last use."""


class PackFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """Read-only file system that shows one pack.

    Paths are relative to the packed folder. Names that are not UTF-8 are decoded as Python decodes
    those of files (`os.fsdecode`). Instances can be pickled, and used after a fork and by several
    threads.

    Args:
        target: the pack's folder.

    Raises:
        DataError: there is no pack, or it is damaged; later also by reads.
    """

    protocol = "pydist"
    root_marker = ""
    # fsspec would return an earlier instance for equal arguments, with which a relative path can
    # lead to another pack now; `_opened` keeps packs instead.
    cachable = False

    def __init__(self, target: str | Path, **options: Any) -> None:
        super().__init__(target, **options)
        self.folder = Path(target).absolute()
        """The pack's folder."""
        self.pack = _opened(self.folder)

    @property
    def _fs_token(self) -> str:
        """Token that is equal for file systems of the same pack."""
        return str(tokenize(str(self.folder), self.pack.id))

    def __reduce__(self) -> tuple[Any, ...]:
        options = {name: each for name, each in self.storage_options.items() if name != "target"}
        return _again, (type(self), self.folder, options, self.pack.id)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = stringify_path(path)
        inner = _split(text)[1] if text.startswith(_PREFIX) else text
        return inner.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"target": _split(path)[0]} if path.startswith(_PREFIX) else {}

    def unstrip_protocol(self, name: str) -> str:
        """Returns the URL of a path: `pydist://FOLDER/path`."""
        return f"{_PREFIX}{self.folder}/{self._strip_protocol(name)}"

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Returns `name`, `size` in bytes, `type`, `mode` and `mtime` (seconds since 1970)."""
        path = self._strip_protocol(path)
        return _info(path, self.entry(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Lists a folder, sorted by the bytes of the names: infos, or names alone."""
        path = self._strip_protocol(path)
        entry = self.entry(path)
        if not entry.is_directory:
            return [_info(path, entry) if detail else path]
        before = f"{path}/" if path else ""
        children = self.pack.children(entry.number)
        named = ((before + os.fsdecode(child.name), child) for child in children)
        return [_info(name, child) if detail else name for name, child in named]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Reads a file, or a part of it by the rules of slices."""
        entry = self._file(self._strip_protocol(path))
        if start is None and end is None:
            return self.pack.read(entry.number)
        first, stop, _ = slice(start, end).indices(entry.size)
        with self.open(path) as file:
            file.seek(first)
            return file.read(max(0, stop - first))

    def modified(self, path: str) -> datetime.datetime:
        """Returns the time of a file's last change."""
        return datetime.datetime.fromtimestamp(self.info(path)["mtime"], datetime.timezone.utc)

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Extracts files and folders, with their modes and times."""
        made: list[tuple[str, native.PackEntry]] = []
        super().get(rpath, lpath, recursive, callback, maxdepth, made=made, **kwargs)
        # Folders last, the inner ones first: adding a file changes a folder's time.
        for path, entry in sorted(made, key=lambda each: len(each[0]), reverse=True):
            _restore(path, entry)

    def get_file(self, rpath: str, lpath: Any, **kwargs: Any) -> None:
        """Extracts one file with its mode and time, or makes a folder."""
        made = kwargs.pop("made", None)
        entry = self.entry(self._strip_protocol(rpath))
        super().get_file(rpath, lpath, **kwargs)
        if isinstance(lpath, str | os.PathLike):
            if entry.is_directory and made is not None:
                made.append((os.fspath(lpath), entry))
            else:
                _restore(os.fspath(lpath), entry)

    def entry(self, path: str) -> native.PackEntry:
        """Returns the entry of a path; raises `FileNotFoundError` if there is none."""
        number = self.pack.find(os.fsencode(path))
        if number is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.pack.entry(number)

    def _file(self, path: str) -> native.PackEntry:
        entry = self.entry(path)
        if entry.is_directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return entry

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> IO[bytes]:
        if mode != "rb":
            self._refuse()
        entry = self._file(path)
        if entry.codec != "raw" or entry.size <= _READ_WHOLE:
            return _File(io.BytesIO(self.pack.read(entry.number)), entry.size)
        return _File(_RawFile(self.pack, entry), entry.size)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("packs can only be read; make a new one with pydist.packs.pack")

    mkdir = makedirs = rmdir = rm_file = cp_file = put_file = pipe_file = touch = _refuse


class _File(io.BufferedReader):
    """A file that is open for reading, with its `size` in bytes, which fsspec uses."""

    def __init__(self, raw: io.RawIOBase | io.BytesIO, size: int) -> None:
        super().__init__(raw, 1 << 16)
        self.size = size


class _RawFile(io.RawIOBase):
    """A file that is stored raw, read by parts, which have no checksums of their own."""

    def __init__(self, pack: native.PackFolder, entry: native.PackEntry) -> None:
        self._pack = pack
        self._entry = entry
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.size}
        if whence not in start:
            raise UsageError(f"whence={whence}: 0, 1 or 2")
        if start[whence] + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = start[whence] + offset
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        count = self._pack.read_part(self._entry.number, self._at, buffer)
        self._at += count
        return count


def _opened(folder: Path) -> native.PackFolder:
    """Opens a pack, or returns the one that was opened from the same files and servers."""
    try:
        index = Stamp.of((folder / native.PACK_INDEX).stat())
    except OSError:
        return open_pack(folder)  # which says what is wrong
    return _kept(folder, index, os.environ.get(SERVERS), os.environ.get(SECRET))


@functools.lru_cache(_OPEN)
def _kept(folder: Path, *opened_from: object) -> native.PackFolder:
    return open_pack(folder)


def _again(
    kind: type[PackFileSystem], folder: Path, options: dict[str, Any], id: bytes
) -> PackFileSystem:
    """Opens the pack of a file system that was pickled."""
    found = kind(folder, **options)
    if found.pack.id != id:
        raise DataError(f"{folder}: the pack was replaced by another one")
    return found


def _split(url: str) -> tuple[str, str]:
    """Returns the pack's folder and the path inside of it: the first folder that has an index."""
    path = url.removeprefix(_PREFIX)
    parts = path.split("/")
    for end in range(1, len(parts) + 1):
        folder = "/".join(parts[:end]) or "/"
        if Path(folder, native.PACK_INDEX).is_file():
            return folder, "/".join(parts[end:])
    raise DataError(f"{url}: no folder on this path is a pack ({native.PACK_INDEX} is missing)")


def _info(path: str, entry: native.PackEntry) -> dict[str, Any]:
    kind = stat.S_IFDIR if entry.is_directory else stat.S_IFREG
    return {
        "name": path,
        "size": entry.size,
        "type": "directory" if entry.is_directory else "file",
        "mode": kind | entry.mode,
        "mtime": entry.mtime_ns / 1e9,
    }


def _restore(path: str, entry: native.PackEntry) -> None:
    """Gives an extracted file or folder its time and its permissions."""
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
    with contextlib.suppress(PermissionError):  # some file systems have no modes
        # No set-user-id: a pack from anywhere must not make programs that run as another user.
        Path(path).chmod(entry.mode & 0o777)
