"""Environment of the processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import pydist


def child_environment(**variables: str) -> dict[str, str]:
    """This process's variables, and the place of the pydist that it tests.

    Start children in a folder other than the checkout's: `python -m` and `-c` would import pydist
    from there, where an installed one is to be tested.
    """
    package = Path(pydist.__path__[0]).parent
    place: dict[str, str] = {}
    if package.name not in ("site-packages", "dist-packages"):
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = dict.fromkeys([str(package), *given])
        place["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {**os.environ, **place, **variables}
