"""Passes on what the ranks and their MPI launcher write to stderr, without the echo of a failure.

When a rank fails, pydist has said why; what Open MPI and MPICH add about `MPI_Abort` would bury it.
"""

from __future__ import annotations

import re
import sys

_RULE = re.compile(rb"^-{20,}\s*$")
_BLOCK_ECHOES = (
    b"MPI_ABORT was invoked",
    b'calling\n"abort"',
    b"one or more processes exited with non-zero status",
)
_LINE_ECHO = re.compile(rb"^Abort\(\d+\) on node \d+ ")
_NOTHING = b" \t\r\n\0"
"""Open MPI ends what a failed rank wrote with a zero byte."""


class StderrFilter:
    """Give it bytes as they arrive; it writes all but the echoes to this process's stderr."""

    def __init__(self) -> None:
        self._line = b""
        self._block: list[bytes] | None = None  # lines since a rule of dashes, that one included

    def feed(self, data: bytes, failed: bool) -> None:
        """Take what has arrived.

        Args:
            data: bytes of the stream.
            failed: whether a rank has reported a failure; before that all passes unchanged.
        """
        if not failed:
            self._write(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._filter(line + b"\n")

    def close(self) -> None:
        """Write what was held back, unless it is an echo."""
        if self._line:
            self._filter(self._line)
        if self._block is not None:
            self._write(b"".join(self._block))
        self._line, self._block = b"", None

    def _filter(self, line: bytes) -> None:
        rule = _RULE.match(line) is not None
        if self._block is not None:
            self._block.append(line)
            if rule:
                text = b"".join(self._block)
                self._block = None
                if not any(echo in text for echo in _BLOCK_ECHOES):
                    self._write(text)
        elif rule:
            self._block = [line]
        elif not _LINE_ECHO.match(line) and line.strip(_NOTHING):
            self._write(line)

    @staticmethod
    def _write(data: bytes) -> None:
        sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()
