"""What the kernel says of processes that this one has not started: Linux only, else unknown."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_PATIENCE = 1.0
"""Seconds that a process whose files are closed may take to end."""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return _facts(pid)[:1] == ["T"]


def code_of_unreaped(pid: int) -> int | None:
    """Exit code of a process that ends, less than 0 for a signal.

    None if its parent, such as an MPI launcher, has taken the code before: then it is gone.
    """
    until = time.monotonic() + _PATIENCE
    while (facts := _facts(pid)) and time.monotonic() < until:
        if facts[0] == "Z":
            return os.waitstatus_to_exitcode(int(facts[49]))
        time.sleep(0.001)
    return None


def in_words(code: int | None) -> str:
    """How a process has ended, from its exit code; None where that is unknown."""
    if code is None:
        return "ended without a word: killed, crashed, out of memory, or os._exit"
    if code < 0:
        name = next((f" ({each.name})" for each in signal.Signals if each == -code), "")
        return f"was killed by signal {-code}{name}"
    return f"ended with code {code}, without a word"


def _facts(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rsplit(")", 1)[1].split()
    return []
