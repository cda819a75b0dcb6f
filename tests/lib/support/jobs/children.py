"""Environment of the processes that tests start, and waiting for what they do."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
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


def wait_until(
    happened: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 60
) -> None:
    """Waits for something to happen while a process runs; fails when that ends or time is over."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, f"exit code {process.returncode}"
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.01)
