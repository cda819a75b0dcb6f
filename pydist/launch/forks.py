"""Processes that a rank has forked: they are no ranks, and end by themselves.

What a rank does at its end, such as taking leave of MPI or of the process group, would wait for
other ranks for good in a fork. Nor can a fork end as the interpreter ends: MPI's and gloo's
libraries wait there for threads that it does not have. (One thing is lost by that: where no worker
of `pydist run` has started the program, the code of `raise SystemExit(code)` in a fork; that of
`sys.exit(code)` is not.)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_installed: list[int] = []  # the process that has


def at_exit(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Registers what this process does when it ends; a fork of it does not."""
    process = os.getpid()

    def unless_forked() -> None:
        if os.getpid() == process:
            function(*args, **kwargs)

    atexit.register(unless_forked)


def install() -> None:
    """From now on forks of this process end at once, with their functions at exit called before."""
    if not _installed:
        _installed.append(os.getpid())
        os.register_at_fork(after_in_child=_forked)


def end(code: int) -> NoReturn:
    """Ends a fork."""
    atexit.unregister(_end_of_fork)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _forked() -> None:
    atexit.unregister(_end_of_fork)  # of a fork that forks
    atexit.register(_end_of_fork)  # the last one comes first


def _end_of_fork() -> None:
    # Set where the interpreter has printed an error that nobody caught.
    end(1 if getattr(sys, "last_value", None) is not None else 0)
