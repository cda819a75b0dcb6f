"""Reads untrusted files in another process, with limited memory: a crash there is an error here.

A reading process opens the files and copies blocks into memory that both processes share. It may be
ended by whatever a file does to a library: its end is reported with the name of the file, and the
next read starts another one. It has the rights of this process: it is no sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.formats import StoredArray, StoredFile
from pydist.errors import DataError

MEMORY = 4 << 30
"""Bytes of address space of a reading process, besides twice the largest block."""

_SECONDS = 300.0
"""Longest time for one request."""
_LONGEST = 1 << 27
"""Bytes of the longest reply. A file may have 16 MiB of texts, and JSON escapes them."""
_PIECE = 1 << 16
"""Bytes of a reply that are read at a time."""
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pydist.data.isolated_reader import serve_reads; serve_reads(sys.argv[2])"
)


class ReadingProcess:
    """Process that reads files for this one; requests are sequential.

    Args:
        file_format: of the files, a name in `pydist.registry.FORMATS`.
        allow_roots: folders that links may lead to.
        memory: bytes of its address space.
    """

    def __init__(self, file_format: str, allow_roots: Sequence[str | Path], memory: int) -> None:
        self._options = {
            "format": file_format,
            "allow_roots": [str(root) for root in allow_roots],
            "memory": memory,
        }
        self._shared = _shared_memory()
        weakref.finalize(self, os.close, self._shared)
        self._mapped: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, while it runs."""
        return None if self._process is None else self._process.pid

    def open(self, path: Path) -> IsolatedFile:
        """Returns a file, which is opened when an array of it is requested."""
        return IsolatedFile(path, self)

    def ask(self, **request: Any) -> Mapping[str, Any]:
        """Sends a request and returns the reply.

        Raises:
            DataError: the file breaks a rule, as the reading process says.
            ValueError: the file is damaged, or reading it has ended the process.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            reply = json.loads(self._line(process))
        except (OSError, ValueError) as error:
            raise ValueError(self._end(error)) from None
        except BaseException:  # Ctrl-C: the next request would get the reply of this one
            self.close()
            raise
        if not isinstance(reply, dict):
            raise ValueError(self._end(ValueError("its reply is no table")))
        if "error" in reply:
            text = " ".join(str(reply["error"]).split())
            raise (DataError if reply.get("refused") else ValueError)(text)
        return reply

    def room(self, size: int) -> mmap.mmap:
        """Returns shared memory of at least `size` bytes; its content is that of the last read."""
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = None
            os.ftruncate(self._shared, size)
            self._mapped = mmap.mmap(self._shared, size)
        return self._mapped

    def close(self) -> None:
        """Ends the process; a later request starts another one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> subprocess.Popen[bytes]:
        options = json.dumps({**self._options, "shared": self._shared})
        # One thread, one arena: each would reserve address space.
        variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._shared],
            env={**os.environ, **variables},
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _kill, process, os.getpid())
        return process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """Returns the line that the process writes next."""
        assert process.stdout is not None
        source = process.stdout.fileno()
        found = bytearray()
        with selectors.DefaultSelector() as answers:  # select() takes numbers below 1024 only
            answers.register(source, selectors.EVENT_READ)
            while not found.endswith(b"\n"):
                if not answers.select(_SECONDS):
                    raise ValueError(f"it has not answered in {_SECONDS:.0f} s")
                part = os.read(source, _PIECE)
                if not part:
                    raise ValueError
                found += part
                if len(found) > _LONGEST:
                    raise ValueError("its reply is too long")
        return bytes(found)

    def _end(self, error: Exception) -> str:
        """Ends the process after an error; returns what happened, in one line."""
        process = self._process
        assert process is not None
        code = None
        if not str(error) or isinstance(error, OSError):  # it has ended by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(10)
        self.close()
        if code is None:
            return f"its reading process failed: {' '.join(str(error).split())}"
        if code < 0:
            return f"its reading process was ended by {signal.Signals(-code).name}"
        return f"its reading process ended with the code {code}"


@functools.cache
def kept_process(
    file_format: str, allow_roots: tuple[str | Path, ...], memory: int = MEMORY
) -> ReadingProcess:
    """Returns a process that stays, for work that opens many files one after the other.

    Args:
        file_format: see `ReadingProcess`.
        allow_roots: see `ReadingProcess`.
        memory: see `ReadingProcess`.
    """
    return ReadingProcess(file_format, allow_roots, memory)


class IsolatedFile(StoredFile):
    """A file that another process reads."""

    errors = (OSError, ValueError)

    def __init__(self, path: Path, reader: ReadingProcess) -> None:
        super().__init__(path)
        self._reader = reader
        self._change: str | None = None

    def dataset(self, name: str) -> StoredArray:
        """Returns an array's description; see `StoredFile.dataset`."""
        reply = self._reader.ask(op="describe", path=str(self.path), name=name)
        shape, dtype = reply.get("shape"), reply.get("dtype")
        extents: list[Any] = shape if isinstance(shape, list) else [None]
        fits = all(type(n) is int and 0 <= n < 1 << 63 for n in extents)
        if not fits or not isinstance(dtype, str):
            raise ValueError(f"its reading process describes {name!r} as {shape!r}, {dtype!r}")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError(f"its reading process says that {name!r} holds objects")
        return _Described(self, name, tuple(extents), kind)

    def read(
        self,
        dataset: StoredArray,
        window: tuple[slice, ...],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Lets the other process read a part into shared memory, and copies it from there."""
        assert isinstance(dataset, _Described)
        window = window or tuple(slice(0, n) for n in dataset.shape)
        shape = tuple(part.stop - part.start for part in window)
        size = math.prod(shape) * dataset.dtype.itemsize
        room = self._reader.room(max(size, 1))
        box = [[part.start, part.stop] for part in window]
        reply = self._reader.ask(
            op="read", path=str(self.path), name=dataset.name, box=box, bytes=size
        )
        change = reply.get("change")
        self._change = None if change is None else " ".join(str(change).split())
        found: npt.NDArray[Any] = np.frombuffer(room, dataset.dtype, math.prod(shape))
        found = found.reshape(shape)
        if out is None:
            return found.copy()
        out[...] = found
        return out

    def texts(self) -> dict[str, str]:
        """Returns the file's texts; see `StoredFile.texts`."""
        found = self._reader.ask(op="texts", path=str(self.path)).get("texts")
        texts = found if isinstance(found, dict) else {}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def change(self) -> str | None:
        """Describes the change of the file that the last read has found."""
        return self._change

    def close(self) -> None:
        """Closes the file in the other process, if that runs."""
        if self._reader.pid is not None:
            with contextlib.suppress(DataError, ValueError):
                self._reader.ask(op="close", path=str(self.path))


class _Described:
    """An array in a file that another process reads."""

    def __init__(
        self, file: IsolatedFile, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._file, self.name = file, name
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def __getitem__(self, window: tuple[slice, ...]) -> npt.NDArray[Any]:
        return self._file.read(self, window)


def _shared_memory() -> int:
    """Returns the descriptor of memory that another process can map, but not shrink."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    import fcntl

    descriptor = os.memfd_create("pydist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Reading memory that was cut off would end this process with a signal.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork: the process is its parent's
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
