"""Makes and saves figures by matplotlib, which need not be installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from pydist.errors import DiskError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING_PLOT_LIBRARY = "a picture needs matplotlib: pip install 'pydist[plot]'"


def can_draw() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """Creates an empty figure, sizes in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(MISSING_PLOT_LIBRARY) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure, in the format that the suffix of its path names.

    Raises:
        DiskError: the file can't be written.
        UsageError: matplotlib has no such format.
    """
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise DiskError(f"can't write {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
