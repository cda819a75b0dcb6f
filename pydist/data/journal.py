"""A file of results by name, to which a run appends; an interrupted run goes on from it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from pydist.data.regular import open_regular
from pydist.errors import DiskError
from pydist.parsing import parse_json


class Journal:
    """Results that are kept by name in a file of JSON lines; thread-safe.

    A line that was cut short by a crash is ignored.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._found: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
                lines = file.read().splitlines()
            for line in lines:
                with contextlib.suppress(ValueError, TypeError):
                    name, result = parse_json(line)
                    self._found[name] = result

    def get(self, name: str) -> Any:
        """Returns the latest result of a name; `None` without one."""
        return self._found.get(name)

    def add(self, name: str, result: Any) -> None:
        """Appends a result.

        Raises:
            DiskError: the file can't be written.
        """
        line = json.dumps([name, result])
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with self._lock, os.fdopen(open_regular(self.path, flags), "a") as file:
                file.write(f"\n{line}\n")  # the first ends a line that was cut short
        except OSError as error:
            raise DiskError(f"{self.path}: {error.strerror}") from error
        self._found[name] = result

    def remove(self) -> None:
        """Removes the file: its results are stored elsewhere now."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
