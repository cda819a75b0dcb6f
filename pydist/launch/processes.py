"""State and exit codes of processes that are not children of this one (Linux only)."""

from __future__ import annotations

import os
import signal
import time

from pydist import owner

_PATIENCE = 1.0
"""Seconds that a process may take to end after its files are closed."""


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped by a signal."""
    return owner.stat_of(pid)[:1] == ["T"]


def code_of_unreaped(pid: int) -> int | None:
    """Returns the exit code of a process that is ending, < 0 for a signal.

    Returns None if its parent, such as an MPI launcher, has already reaped the process.
    """
    until = time.monotonic() + _PATIENCE
    while (facts := owner.stat_of(pid)) and time.monotonic() < until:
        if facts[0] == "Z":
            return os.waitstatus_to_exitcode(int(facts[49]))
        time.sleep(0.001)
    return None


def in_words(code: int | None) -> str:
    """Describes how a process has ended, by its exit code (None if unknown)."""
    if code is None:
        return "ended without reporting an error: killed, crashed, out of memory, or os._exit"
    if code < 0:
        name = next((f" ({each.name})" for each in signal.Signals if each == -code), "")
        return f"was killed by signal {-code}{name}"
    return f"ended with code {code}, without reporting an error"
