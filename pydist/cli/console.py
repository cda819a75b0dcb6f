"""Provides the console of the commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console as RichConsole

from pydist.launch import launcher_env

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


class Console(RichConsole):
    """Console whose errors reach `pydist.cli.main`, like those of `print`.

    Args:
        stderr: whether it prints to stderr, where stdout has a result for a program.
    """

    def __init__(self, stderr: bool = False) -> None:
        forced = None if _may_be_a_terminal(2 if stderr else 1) else False
        super().__init__(highlight=False, stderr=stderr, force_terminal=forced)

    def on_broken_pipe(self) -> None:
        """Re-raises `BrokenPipeError`; rich's own method ends the process with code 1."""
        error = sys.exc_info()[1]
        assert error is not None
        raise error


def _may_be_a_terminal(descriptor: int) -> bool:
    """Returns whether output can reach a terminal; then rich looks whether this process has one.

    Open MPI's does not tell: each rank has one of its own, whose output `mpirun` passes on, be it
    to a file. `mpirun` is the parent of the ranks on its node.
    """
    who = launcher_env.detect()
    if who is None or who.launcher != "openmpi":
        return True
    try:
        output = Path(f"/proc/{os.getppid()}/fd/{descriptor}").readlink()
    except OSError:
        return False
    return str(output).startswith(_TERMINALS)
