"""The parser of commands that forward most options, without heavy imports."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pydist.errors import UsageError


class OwnOptions(argparse.ArgumentParser):
    """Argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        raise UsageError(f"{message}; {self.prog} --help tells more")
