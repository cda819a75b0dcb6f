"""Keeps the open files of a data set, checked against the manifest, never used after a fork."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pydist.data.axes import channels_last, file_order
from pydist.data.data_file import kind_of
from pydist.data.formats import Driver, StoredArray, StoredFile
from pydist.data.isolated import MEMORY, ReadingProcess, kept_process
from pydist.data.made import checksum_of_file
from pydist.data.manifest import DataFile, Manifest
from pydist.data.regular import TrustedTree
from pydist.errors import DataError, PydistError, UsageError, one_line
from pydist.registry import FORMATS

_T = TypeVar("_T")

_ATTEMPTS = 3
"""Number of reads of a file that changes during every read and still has its content."""


class OpenedFile:
    """File that is open, with its checked arrays."""

    def __init__(self, file: StoredFile, samples: StoredArray, label: StoredArray | None) -> None:
        self.file = file
        self.samples = samples
        self.label = label
        self.target: npt.NDArray[np.float64] | None = None
        """The values to predict, after their first read."""


class OpenFiles:
    """Cache of open files, which are opened at their first read.

    Several threads may read different files at a time. Files that another process reads are read
    one at a time.

    Args:
        root: folder to which the manifest's paths are relative.
        manifest: describes the files.
        allow_roots: see `safe_open`.
        limit: the largest number of files that stay open, but for those that are being read.
        driver: makes what reads a path; by default the format's library.
        untrusted: read the files in another process; see `pydist.data.isolated`.
        keeps_process: whether that process stays for other files of the same format, after `close`.

    Raises:
        UsageError: no format has the manifest's `file_format` as its name; or a driver for
            untrusted files.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        allow_roots: Sequence[str | Path],
        limit: int,
        driver: Callable[[Path], Driver] | None,
        untrusted: bool = False,
        keeps_process: bool = False,
    ) -> None:
        self.root = root
        self._tree = TrustedTree(root, allow_roots)
        self.manifest = manifest
        self._allow_roots = tuple(allow_roots)
        self._limit = limit
        self._driver = driver
        self._format: type[StoredFile] = FORMATS.get(manifest.file_format)
        if not (isinstance(self._format, type) and issubclass(self._format, StoredFile)):
            raise UsageError(
                f"format '{manifest.file_format}' is {self._format!r}, which is no subclass of "
                "pydist.data.formats.StoredFile"
            )
        if untrusted and driver is not None:
            raise UsageError("untrusted files are read by another process: no driver is possible")
        self._untrusted, self._keeps_process = untrusted, keeps_process
        self._handles = self._no_handles()

    @property
    def bytes_read(self) -> int:
        """Bytes of the arrays that this process has read so far."""
        return self._current().bytes_read

    def count(self, nbytes: int) -> None:
        """Adds to `bytes_read`; called within `read`."""
        handles = self._current()
        with handles.lock:
            handles.bytes_read += nbytes

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_handles": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._handles = self._no_handles()

    def _no_handles(self) -> _Handles:
        return _Handles(one_at_a_time=self._untrusted)

    def read(self, entry: DataFile, part: Callable[[OpenedFile], _T]) -> _T:
        """Reads a part of a file, while other threads that want this file wait.

        A file that changes while it is open (it shrinks, is overwritten or replaced) is read again
        if its content is still the manifest's: some sites touch files so that they are not deleted.

        Args:
            entry: the file.
            part: reads from the open file.

        Returns:
            What `part` returns.

        Raises:
            DataError: it is missing, damaged, not what the manifest says, or has changed.
        """
        handles = self._current()
        place = handles.hold(entry.path)
        was_open = place.opened is not None
        try:
            for _ in range(_ATTEMPTS):
                if place.opened is None:
                    place.opened = self._open(handles, entry)
                error = None
                try:
                    found = part(place.opened)
                except DataError as damage:  # which a change of the file may have caused
                    error = damage
                change = place.opened.file.change()
                if change is None and error is not None:
                    raise error
                if change is None:
                    return found
                place.close()
                self._require_same(entry, change)
            raise DataError(change)
        finally:
            place.lock.release()
            if not was_open:
                handles.close(self._limit)

    def _require_same(self, entry: DataFile, change: str) -> None:
        """Raises `DataError` unless a changed file has the checksum of the manifest."""
        with suppress(OSError):
            path, kind = self.root / entry.path, kind_of(entry.checksum)
            if kind:
                found = checksum_of_file(path, kind, self._allow_roots)
                if found == (entry.bytes, entry.checksum):
                    return
        raise DataError(change)

    def close(self) -> None:
        """Closes all files; later reads open them again."""
        handles = self._current()
        handles.close(0)
        if handles.reader is not None and not self._keeps_process:
            with handles.reading:
                handles.reader.close()

    def _current(self) -> _Handles:
        """Returns the open files of this process; those of a parent process are left alone."""
        if self._handles.pid != os.getpid():
            self._handles = self._no_handles()
        return self._handles

    def _open(self, handles: _Handles, entry: DataFile) -> OpenedFile:
        """Opens a file, and checks its arrays."""
        path = self._tree.path(entry.path)
        with in_one_line(self._format, path):
            file = self._opened(handles, path)
        try:
            with in_one_line(self._format, path):
                samples = file.dataset(self.manifest.dataset)
                label = file.dataset(self.manifest.label) if self.manifest.label else None
            self._check_samples(file, samples, entry)
            if label is not None:
                self._check_label(file, label, samples)
        except BaseException:
            file.close()
            raise
        return OpenedFile(file, samples, label)

    def _opened(self, handles: _Handles, path: Path) -> StoredFile:
        """Opens a file, in this process or in that of `handles`."""
        if not self._untrusted:
            driver = None if self._driver is None else self._driver(path)
            return self._format.open(path, self._allow_roots, driver)
        if handles.reader is None:
            shape, dtype = self.manifest.sample_shape, np.dtype(self.manifest.dtype)
            memory = min(MEMORY + 2 * math.prod(shape) * dtype.itemsize, 1 << 62)
            reader_of = kept_process if self._keeps_process else ReadingProcess
            handles.reader = reader_of(self.manifest.file_format, self._allow_roots, memory)
        return handles.reader.open(path)

    def _check_samples(self, file: StoredFile, dataset: StoredArray, entry: DataFile) -> None:
        """Compares the array of samples with the manifest."""
        where = f"{file.path}: {self.manifest.dataset!r}"
        expected = np.dtype(self.manifest.dtype)
        if (dataset.dtype.kind, dataset.dtype.itemsize) != (expected.kind, expected.itemsize):
            raise DataError(f"{where} holds {dataset.dtype}; the manifest says {expected}")
        extents = self._needed(entry)
        channels = self.manifest.sample_shape[0]
        axes = self.manifest.axes
        needed = file_order(axes, (channels, *extents))
        fits = dataset.ndim == len(needed) and all(
            n >= m for n, m in zip(dataset.shape, needed, strict=True)
        )
        if not fits or dataset.shape[-1 if channels_last(axes) else 0] != channels:
            raise DataError(f"{where} has the shape {dataset.shape}; {needed} was expected")

    def _check_label(self, file: StoredFile, dataset: StoredArray, samples: StoredArray) -> None:
        """Raises `DataError` unless labels are integers with the extents of the samples."""
        where = f"{file.path}: {self.manifest.label!r}"
        if dataset.dtype.kind not in "iu":
            raise DataError(f"{where} holds {dataset.dtype}; labels are integers")
        needed = samples.shape[:-1] if channels_last(self.manifest.axes) else samples.shape[1:]
        if dataset.shape != needed:
            raise DataError(f"{where} has the shape {dataset.shape}; {needed} was expected")

    def _needed(self, entry: DataFile) -> tuple[int, ...]:
        """Returns the least extents (D, H, W) of the file's arrays."""
        extents = entry.extents or self.manifest.sample_shape[1:]
        reach = [max((offset[axis] for offset in entry.offsets), default=0) for axis in range(3)]
        return tuple(r + n for r, n in zip(reach, extents, strict=True))


class _Place:
    """Place of a file, which is open or not.

    Args:
        lock: held by the thread that reads, opens or closes the file.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self.opened: OpenedFile | None = None

    def close(self) -> None:
        """Closes the file, if it is open; the caller holds the lock."""
        if self.opened is not None:
            self.opened.file.close()
            self.opened = None


class _Handles:
    """Open files that one process has, by path; the least recently used comes first.

    Args:
        one_at_a_time: whether a thread that reads a file excludes all others.
    """

    def __init__(self, one_at_a_time: bool) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        """Guards the table and the count; no file is opened, read or closed under it."""
        self.reading = threading.Lock()
        """That of all places, if only one thread may read at a time."""
        self.bytes_read = 0
        self.reader: ReadingProcess | None = None
        self._one_at_a_time = one_at_a_time
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def hold(self, path: str) -> _Place:
        """Returns the place of a file, whose lock the caller holds from now on."""
        while True:
            with self.lock:
                if path not in self._places:
                    lock = self.reading if self._one_at_a_time else threading.Lock()
                    self._places[path] = _Place(lock)
                self._places.move_to_end(path)
                place = self._places[path]
            place.lock.acquire()
            if self._places.get(path) is place:
                return place
            place.lock.release()  # another thread has closed the file meanwhile

    def close(self, limit: int) -> None:
        """Closes files until only `limit` are left. The caller holds none: it would deadlock."""
        while True:
            with self.lock:
                if len(self._places) <= limit:
                    return
                _, place = self._places.popitem(last=False)
            with place.lock:
                place.close()


@contextmanager
def in_one_line(format: type[StoredFile], path: Path) -> Iterator[None]:
    """Converts a format's exceptions for a file into a `DataError` that names the file."""
    try:
        yield
    except PydistError:
        raise
    except format.errors as error:
        raise DataError(f"{path}: {type(error).__name__}: {one_line(error)}") from error
