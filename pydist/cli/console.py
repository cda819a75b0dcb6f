"""Where commands print to."""

from __future__ import annotations

import sys

from rich.console import Console as RichConsole


class Console(RichConsole):
    """A console whose errors reach `pydist.cli.main`, as those of `print` do."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Raises `BrokenPipeError` anew; rich's own ends the process with code 1."""
        error = sys.exc_info()[1]
        assert error is not None
        raise error
