"""The parser of commands that forward most options, without heavy imports."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn

from pydist.errors import UsageError


class OwnOptions(argparse.ArgumentParser):
    """Argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        raise UsageError(f"{message}; {self.prog} --help tells more")

    def refuse_misspelled(self, others: Iterable[str]) -> None:
        """Raises `UsageError` if one of the other arguments resembles an option of this parser.

        To be called before the configuration's options are searched for close matches.
        """
        for given in others:
            name = given.partition("=")[0]
            if own := difflib.get_close_matches(name, self._option_string_actions, 1, 0.8):
                raise UsageError(f"unknown option {given}; did you mean {own[0]}?")
