"""Reports of a rank to its watchdog: its phase, and whether it waits for other ranks.

The watchdog is native (`csrc/watchdog`): one thread per rank, without the interpreter's lock, and
a page of shared memory per machine. A job hangs if no rank makes progress for the limit,
`PYDIST_HANG_LIMIT` seconds, while at least one rank waits in an exchange. Then the watchdog names
the ranks, writes their stacks and ends the job with exit code 72. `pydist.launch.watch` starts the
watchdog; without one, these functions have no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pydist._loader import native

SPAN: int = native.PHASE_SPAN
"""The rank is in a named phase; nested phases determine whether it waits."""
WAIT: int = native.PHASE_WAIT
"""The rank waits for other ranks, at most the limit without progress."""
BLOCKED: int = native.PHASE_BLOCKED
"""A call that returns soon, unless a file, a device or the launcher does not respond."""
WORK: int = native.PHASE_WORK
"""The rank works, or all ranks do, and may be silent for three times the limit."""
END: int = native.PHASE_END
"""The rank's program has ended; it sends nothing more, and waits for the others to end."""

MODULE_PATH = "_pydist_path"
"""Attribute of modules: their path in the whole model, for reports and comparisons of calls."""

P = ParamSpec("P")
R = TypeVar("R")


def waits(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates functions that return when other ranks have done their part.

    Args:
        name: description of the wait, at most 48 characters; the report shows it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
            native.enter_phase(name, WAIT)
            try:
                return function(*args, **kwargs)
            finally:
                native.leave_phase()

        return waiting

    return decorate


class phase:  # noqa: N801  a context manager, used as a function
    """A context manager that reports the phase of its block to the watchdog.

    Args:
        name: at most 48 characters; the report shows it.
        kind: `WORK` for blocks that may be silent for longer than the limit: autotuning, capture,
            saving, opening data. `WAIT` for blocks that wait for other ranks, `BLOCKED` for others,
            `SPAN` for blocks that only have a name.
    """

    __slots__ = ("_kind", "_name")

    def __init__(self, name: str, kind: int = WORK) -> None:
        self._name, self._kind = name, kind

    def __enter__(self) -> None:
        native.enter_phase(self._name, self._kind)

    def __exit__(self, *_: object) -> None:
        native.leave_phase()


def end_of_program() -> None:
    """Reports to the watchdog that this rank's program has ended."""
    native.enter_phase("the end of the program", END)


def at_step(step: int) -> None:
    """Reports the number of the training step to the watchdog."""
    native.mark_step(step)


def ended_ranks() -> list[int]:
    """Returns the ranks of this machine that are known to have ended their program."""
    return native.ended_ranks()
