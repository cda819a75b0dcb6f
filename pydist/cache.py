"""Names the folder in which measurements of this machine stay between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder: `PYDIST_CACHE`, by default `pydist` in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PYDIST_CACHE") or base / "pydist")
