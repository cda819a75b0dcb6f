"""Programs that tests start by path, as jobs of several ranks."""

from __future__ import annotations

from pathlib import Path


def path_of(name: str) -> Path:
    """Returns the file of a program."""
    return Path(__file__).with_name(f"{name}.py")
