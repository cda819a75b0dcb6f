"""Compares a run's output folder with its data set's, without torch: launchers do it, too."""

from __future__ import annotations

from pathlib import Path

from pydist.data.publish import real_path
from pydist.errors import UsageError


def refuse_data_folder(folder: Path, data: Path) -> None:
    """Stops a run before it writes between the files of a data set.

    Raises:
        UsageError: its folder is that of the data set.
    """
    if real_path(folder) == real_path(data):
        raise UsageError(
            f"output.folder = {str(folder)!r} is the data set's folder, data.path = {str(data)!r}: "
            "choose another one"
        )
