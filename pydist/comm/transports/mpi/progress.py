"""The progress engine, for libraries that transfer messages only inside of calls.

`Transport.progress()` is called between the library calls of a step, in backward after each
parameter's gradient. With nothing in flight its cost is negligible;
`benchmarks/python/progress.py` measures what it gains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Advancing(Protocol):
    """Operation in flight with steps of its own after the library has moved its messages."""

    def advance(self) -> None:
        """Performs the steps that are possible without waiting."""
        ...


class ProgressEngine:
    """Counter of operations in flight in this process, which polls the library meanwhile.

    Args:
        poll: lets the library advance all its operations in flight; cheap.
    """

    def __init__(self, poll: Callable[[], None]) -> None:
        self._poll = poll
        self._under_way = 0
        self._advancing: dict[Advancing, int] = {}  # number of operations in flight of each
        self.works: set[object] = set()
        """Collectives in flight: MPI writes into their buffers even if no one waits."""

    def started(self, what: Advancing | None = None) -> None:
        """Notes that an operation is in flight, with steps of its own if `what` is given."""
        self._under_way += 1
        if what is not None:
            self._advancing[what] = self._advancing.get(what, 0) + 1

    def ended(self, what: Advancing | None = None) -> None:
        """Notes that an operation is complete."""
        self._under_way -= 1
        if what is not None:
            self._advancing[what] -= 1
            if not self._advancing[what]:
                del self._advancing[what]

    def progress(self) -> None:
        """Polls if an operation is in flight."""
        if self._under_way:
            self._poll()
            for each in list(self._advancing):
                each.advance()
