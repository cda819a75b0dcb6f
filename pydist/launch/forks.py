"""The end of processes that a rank has forked: they are not ranks.

The exit functions of a rank, such as leaving MPI or the process group, would wait for other ranks
forever in a fork. Nor can a fork end as the interpreter does: the libraries of MPI and gloo wait
for threads that a fork does not have. (This loses one thing: the code of `raise SystemExit(code)`
in a fork, if the program was not started by a worker of `pydist run`; `sys.exit(code)` works.)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_installed: list[int] = []  # the process that has installed the hooks


def at_exit(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Registers an exit function of this process that its forks do not call."""
    process = os.getpid()

    def unless_forked() -> None:
        if os.getpid() == process:
            function(*args, **kwargs)

    atexit.register(unless_forked)


def install() -> None:
    """Makes forks of this process end right after their exit functions."""
    if not _installed:
        _installed.append(os.getpid())
        os.register_at_fork(after_in_child=_forked)


def end(code: int) -> NoReturn:
    """Ends a fork after its exit functions."""
    atexit.unregister(_end_of_fork)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _forked() -> None:
    atexit.unregister(_end_of_fork)  # registered by the parent if that is a fork
    atexit.register(_end_of_fork)


def _end_of_fork() -> None:
    # Set where the interpreter has printed an error that nothing caught.
    end(1 if getattr(sys, "last_value", None) is not None else 0)
