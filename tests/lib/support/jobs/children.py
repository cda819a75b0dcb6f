"""Processes that tests start: their environment, their output, and waiting for their actions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pydist


def child_environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Returns this process's variables, with the path of the pydist under test after `folders`.

    Start children outside the checkout: `python -m` and `-c` would import pydist from there,
    instead of the installed one under test.
    """
    path = [str(folder) for folder in folders]
    package = Path(pydist.__path__[0]).parent
    if package.name not in ("site-packages", "dist-packages"):
        path.append(str(package))
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def run_python(
    *arguments: str | Path,
    folder: Path,
    launcher: Sequence[str] = (),
    path: Sequence[Path] = (),
    seconds: float = 100,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with the pydist under test; returns its output, whatever its exit code.

    Args:
        arguments: of the interpreter.
        folder: the working folder.
        launcher: command that starts the interpreter.
        path: folders from which it also imports.
        seconds: after which the test fails.
        variables: of the environment.
    """
    return subprocess.run(
        [*launcher, sys.executable, *map(str, arguments)],
        cwd=folder,
        env=child_environment(*path, **variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def wait_until(
    happened: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 60
) -> None:
    """Waits for an event while a process runs; fails if the process ends or time is over."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process is None or process.poll() is None, f"exit code {process.returncode}"
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.01)
