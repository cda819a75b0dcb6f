"""The few options of commands that hand all others on: read without waiting for a heavy import."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pydist.errors import UsageError


class OwnOptions(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        raise UsageError(f"{message}; {self.prog} --help tells more")
