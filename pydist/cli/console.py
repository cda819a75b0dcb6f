"""Provides the console of the commands."""

from __future__ import annotations

import sys

from rich.console import Console as RichConsole

from pydist.cli.streams import may_be_a_terminal


class Console(RichConsole):
    """Console whose errors reach `pydist.cli.main`, like those of `print`.

    Args:
        stderr: whether it prints to stderr, where stdout has a result for a program.
    """

    def __init__(self, stderr: bool = False) -> None:
        forced = None if may_be_a_terminal(2 if stderr else 1) else False
        super().__init__(highlight=False, stderr=stderr, force_terminal=forced)

    def on_broken_pipe(self) -> None:
        """Re-raises `BrokenPipeError`; rich's own method ends the process with code 1."""
        error = sys.exc_info()[1]
        assert error is not None
        raise error
