"""Forwards stderr of the ranks and their MPI launcher without the launcher's echo of a failure.

When a rank fails, pydist reports the cause; the output of Open MPI and MPICH about `MPI_Abort`
would bury it.
"""

from __future__ import annotations

import codecs
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
"""Open MPI ends the output of a failed rank with a zero byte."""


class StderrFilter:
    """Filter that writes the bytes it is fed to stderr, except for echoes of a failure."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = b""
        self._block: list[bytes] | None = None  # lines since a rule of dashes, including it

    def feed(self, data: bytes, failed: bool) -> None:
        """Filters bytes that have arrived.

        Args:
            data: bytes of the stream.
            failed: whether a rank has reported a failure; until then all bytes pass unchanged.
        """
        if not failed:
            self._write(data)
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._filter(line + b"\n")

    def close(self) -> None:
        """Writes the retained bytes, unless they are an echo."""
        if self._line:
            self._filter(self._line)
        if self._block is not None:
            self._write(b"".join(self._block))
        self._line, self._block = b"", None
        self._write(b"", final=True)

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

    def _write(self, data: bytes, final: bool = False) -> None:
        sys.stderr.write(self._decoder.decode(data, final))  # retains a part of a character
        sys.stderr.flush()
