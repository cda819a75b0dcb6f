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
    if package.name in ("site-packages", "dist-packages"):
        return {**os.environ, **variables}
    path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
