"""Child processes that are killed after a time, or at one of their steps in the file system."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

STEPS = frozenset({"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"})
"""Python's audit events before a change in the file system."""


class Ended(NamedTuple):
    """How a child ended."""

    killed: bool
    result: Any
    """What its function returned, as JSON has it; None if it was killed before."""
    steps: int
    """Steps of a child that was not killed."""
    seconds: float


def in_child(
    work: Callable[[], Any], folder: Path, *, delay: float | None = None, step: int = 0
) -> Ended:
    """Calls a function in a forked process.

    Args:
        work: the function; its result can be written as JSON.
        folder: changes below it are steps.
        delay: seconds after which the process is killed; None for never.
        step: kills it before its first step (1), before the second one (2), and so on; 0 for never.

    Raises:
        AssertionError: it failed.
    """
    reads, writes = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run(work, folder, step, writes)
    os.close(writes)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reads, "rb") as pipe:
        content = pipe.read()
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"it ended with the status {status}"
    result, steps = json.loads(content) if content else (None, 0)
    return Ended(killed, result, steps, time.monotonic() - began)


def _run(work: Callable[[], Any], folder: Path, step: int, writes: int) -> None:
    below, steps, seen = os.fspath(folder), itertools.count(1), [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in STEPS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if os.fsdecode(arguments[0]).startswith(below):
            seen[0] = next(steps)
            if seen[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.addaudithook(hook)
        content = json.dumps([work(), seen[0]]).encode()
        os.write(writes, content)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)
