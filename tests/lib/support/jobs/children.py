"""Environment of the processes that tests start, and waiting for their actions."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pydist


def child_environment(**variables: str) -> dict[str, str]:
    """Returns this process's variables, with the path of the pydist under test.

    Start children outside the checkout: `python -m` and `-c` would import pydist from there,
    instead of the installed one under test.
    """
    package = Path(pydist.__path__[0]).parent
    if package.name in ("site-packages", "dist-packages"):
        return {**os.environ, **variables}
    path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def wait_until(
    happened: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 60
) -> None:
    """Waits for an event while a process runs; fails if the process ends or time is over."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, f"exit code {process.returncode}"
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.01)
