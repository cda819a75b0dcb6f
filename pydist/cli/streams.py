"""Prepares the standard streams of a command: always open, able to print every character."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from pydist.errors import UsageError
from pydist.launch import launcher_env

_RAISING = ("strict", "surrogateescape", "surrogatepass")

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")

_WIDTH = "COLUMNS"
_NARROWEST = 40
"""Least characters per line: at width 0 tables are empty, and at small widths they never end."""


def prepare() -> None:
    """Makes the standard streams safe to write to, for this process and its children.

    A closed stream (`2>&-`) becomes the null device: otherwise the next opened file would get its
    descriptor, and receive the messages. Characters outside the encoding of stdout or stderr are
    printed as escapes. A width in the environment that is invalid or too narrow is ignored.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    # Python has set a stream to None if it was closed when the interpreter started.
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  open until the process ends
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  open until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _RAISING:
            stream.reconfigure(errors="backslashreplace")
    if not may_be_a_terminal(1):
        os.environ["TERM"] = "dumb"  # for the help and the errors of options
    width = os.environ.get(_WIDTH, "")
    if width and not (width.isascii() and width.isdigit() and int(width) >= _NARROWEST):
        del os.environ[_WIDTH]


def may_be_a_terminal(descriptor: int) -> bool:
    """Returns whether output can reach a terminal, if that of this process is one.

    Open MPI's ranks each have one, whose output `mpirun` passes on, be it to a file. `mpirun` is
    the parent of the ranks on its node.

    Args:
        descriptor: 1 for stdout, 2 for stderr.
    """
    try:
        who = launcher_env.detect()
    except UsageError:  # which the command reports
        return True
    if who is None or who.launcher != "openmpi":
        return True
    try:
        output = Path(f"/proc/{os.getppid()}/fd/{descriptor}").readlink()
    except OSError:
        return False
    return str(output).startswith(_TERMINALS)
