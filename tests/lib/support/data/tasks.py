"""Functions for worker processes, which can't import test modules."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pydist.errors import DataError


def square(number: int) -> int:
    return number * number


def refuse_three(number: int) -> int:
    if number == 3:
        raise DataError("three is refused")
    return number


def die(number: int) -> int:
    os._exit(9)


def linger(trace: str) -> None:
    """Writes this process's id to a file, and then takes longer than any test."""
    with Path(trace).open("a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(3600)
