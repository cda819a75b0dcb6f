"""The process that reads untrusted files for another one; see `pydist.data.isolated`."""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np

from pydist.data.formats import StoredArray, StoredFile
from pydist.errors import DataError
from pydist.registry import FORMATS


def serve_reads(options: str) -> None:
    """Answers requests from standard input, one JSON line each, until it ends.

    Args:
        options: see `ReadingProcess`, as JSON, with the descriptor of the shared memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's interrupt
    wanted = json.loads(options)
    # A library may print: replies have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nowhere, standard)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = wanted["memory"] if most == resource.RLIM_INFINITY else min(wanted["memory"], most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    reader = _Reader(wanted)
    for line in requests:
        replies.write(json.dumps(reader.answer(json.loads(line))).encode() + b"\n")
        replies.flush()


class _Reader:
    """Files that the process holds open."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._format: type[StoredFile] = FORMATS.get(options["format"])
        self._roots: list[str] = options["allow_roots"]
        self._shared: int = options["shared"]
        self._files: dict[str, tuple[StoredFile, dict[str, StoredArray]]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the reply to a request; its "error" is one line."""
        path = request["path"]
        try:
            return self._done(path, request)
        except DataError as error:
            return {"error": str(error)[:2000], "refused": True}
        except MemoryError:
            return {"error": "it needs more memory than its reading process may take"}
        except Exception as error:  # whatever a damaged file leads to
            return {"error": f"{type(error).__name__}: {error}"[:2000]}

    def _done(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "close":
            self._close(path)
            return {}
        if request["op"] == "texts":
            return {"texts": self._file(path)[0].texts()}
        array = self._array(path, request["name"])
        if request["op"] == "describe":
            return {"shape": [int(n) for n in array.shape], "dtype": array.dtype.str}
        return self._read(path, array, request)

    def _read(self, path: str, array: StoredArray, request: dict[str, Any]) -> dict[str, Any]:
        window = tuple(slice(start, stop) for start, stop in request["box"])
        shape = tuple(part.stop - part.start for part in window)
        file = self._files[path][0]
        if request["bytes"]:
            with mmap.mmap(self._shared, request["bytes"]) as room:
                out: Any = np.ndarray(shape, array.dtype, room)
                found = file.read(array, window, out)
                if found is not out:
                    out[...] = found
                del out, found  # they refer to the mapped memory
        return {"change": file.change()}

    def _array(self, path: str, name: str) -> StoredArray:
        """Returns an array of a file."""
        file, arrays = self._file(path)
        if name not in arrays:
            arrays[name] = file.dataset(name)
        return arrays[name]

    def _file(self, path: str) -> tuple[StoredFile, dict[str, StoredArray]]:
        """Returns a file, which is opened unless it is open, and those arrays that were read."""
        if path not in self._files:
            self._files[path] = self._format.open(Path(path), self._roots), {}
        return self._files[path]

    def _close(self, path: str) -> None:
        found = self._files.pop(path, None)
        if found is not None:
            found[0].close()
