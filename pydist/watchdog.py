"""What a rank tells its watchdog: which phase it is in, and whether it waits for other ranks.

The watchdog is native (`csrc/watchdog`): one thread per rank, without the interpreter's lock, and
a page of shared memory per machine. A job hangs if no rank makes progress for the limit,
`PYDIST_HANG_LIMIT` seconds, while at least one rank waits in an exchange. Then the watchdog names
the ranks, writes their stacks and ends the job with exit code 72. Nothing here does anything in a
process without a watchdog. `pydist.launch.watch` starts it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pydist._loader import native

SPAN: int = native.PHASE_SPAN
"""The rank does something that has a name; what is within says whether it waits."""
WAIT: int = native.PHASE_WAIT
"""The rank waits for other ranks, at most the limit without progress."""
BLOCKED: int = native.PHASE_BLOCKED
"""A call that returns soon, unless a file, a device or the launcher does not answer."""
WORK: int = native.PHASE_WORK
"""The rank works, or all ranks do, and may be silent for three times the limit."""
END: int = native.PHASE_END
"""The rank's program has ended; it sends nothing more, and waits for the others to end."""

P = ParamSpec("P")
R = TypeVar("R")


def waits(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions that return when other ranks have done their part.

    Args:
        name: what is waited for, at most 48 characters; the report shows it.
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
    """A context manager that tells the watchdog what its block does.

    Args:
        name: at most 48 characters; the report shows it.
        kind: `WORK` for blocks that may be silent for longer than the limit: autotuning, capture,
            saving, opening data. `WAIT` for those that wait for other ranks, `BLOCKED` for others,
            `SPAN` for those that only have a name.
    """

    __slots__ = ("_kind", "_name")

    def __init__(self, name: str, kind: int = WORK) -> None:
        self._name, self._kind = name, kind

    def __enter__(self) -> None:
        native.enter_phase(self._name, self._kind)

    def __exit__(self, *_: object) -> None:
        native.leave_phase()


def end_of_program() -> None:
    """Tells the watchdog that this rank's program has ended."""
    native.enter_phase("the end of the program", END)


def at_step(step: int) -> None:
    """Tells the watchdog the number of the training step."""
    native.mark_step(step)


def ended_ranks() -> list[int]:
    """The ranks of this machine that have reached the end of their program, as far as known."""
    return native.ended_ranks()
