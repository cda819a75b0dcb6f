"""Checks that a path is a regular file: opening a pipe would block forever."""

from __future__ import annotations

import os
from pathlib import Path

from pydist.errors import DataError


def require_regular(path: Path) -> os.stat_result:
    """Returns the `stat` of a regular file.

    Raises:
        DataError: the path is missing, or is a folder, a pipe or a device.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    return status
