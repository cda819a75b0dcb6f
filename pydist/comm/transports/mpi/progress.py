"""The progress engine, for libraries that transfer messages only inside of calls.

The environment variable `PYDIST_PROGRESS` chooses how it works:

- "calls" (the default): `Transport.progress()` is called between the library calls of a step, in
  backward after each parameter's gradient; with nothing in flight its cost is negligible;
- "thread": a thread polls every `INTERVAL_S` while something is in flight. It needs no calls, but
  competes with the computation unless there are more cores than ranks;
- "off": neither; operations in flight advance only inside of waits.

`benchmarks/python/progress.py` measures them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from pydist.errors import UsageError

VARIABLE = "PYDIST_PROGRESS"
WAYS = ("calls", "thread", "off")

INTERVAL_S = 0.0005
"""Pause of the thread between two polls. A poll moves some 100 kB or an entire message."""


class Advancing(Protocol):
    """Operation in flight with steps of its own after the library has moved its messages."""

    def advance(self) -> None:
        """Performs the steps that are possible without waiting. May be called by the thread."""
        ...


class ProgressEngine:
    """Counter of operations in flight in this process, which polls the library meanwhile.

    Args:
        poll: lets the library advance all its operations in flight; cheap.
        way: one of `WAYS`.
    """

    def __init__(self, poll: Callable[[], None], way: str = "calls") -> None:
        self._poll = _Poll(poll)
        self._polls_in_calls = way == "calls"
        self._under_way = 0
        self.works: set[object] = set()
        """Collectives in flight: MPI writes into their buffers even if no one waits."""
        self._thread = _Thread(self._poll) if way == "thread" else None

    @classmethod
    def from_environment(cls, poll: Callable[[], None], threads: bool) -> ProgressEngine:
        """Creates the engine that `PYDIST_PROGRESS` selects.

        Args:
            poll: see the class.
            threads: whether several threads may call the library.

        Raises:
            UsageError: the value is unknown, or the library does not support it.
        """
        way = os.environ.get(VARIABLE, WAYS[0])
        if way not in WAYS:
            raise UsageError(f"{VARIABLE}={way} is none of {', '.join(WAYS)}")
        if way == "thread" and not threads:
            raise UsageError(
                f"{VARIABLE}=thread needs an MPI that may be called by several threads"
                " (MPI_THREAD_MULTIPLE); use calls"
            )
        return cls(poll, way)

    def started(self, what: Advancing | None = None) -> None:
        """Notes that an operation is in flight, with steps of its own if `what` is given."""
        self._under_way += 1
        if what is not None:
            counts = self._poll.advancing
            counts[what] = counts.get(what, 0) + 1
        if self._thread is not None and self._under_way == 1:
            self._thread.busy.set()

    def ended(self, what: Advancing | None = None) -> None:
        """Notes that an operation is complete."""
        self._under_way -= 1
        if what is not None:
            counts = self._poll.advancing
            counts[what] -= 1
            if not counts[what]:
                del counts[what]
        if self._thread is not None and not self._under_way:
            self._thread.busy.clear()

    def progress(self) -> None:
        """Polls if an operation is in flight."""
        if self._under_way and self._polls_in_calls:
            self._poll()

    def close(self) -> None:
        """Ends the thread, if there is one. Idempotent."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None


class _Poll:
    """Poll function, separate from the engine, which its thread must not keep alive."""

    def __init__(self, poll: Callable[[], None]) -> None:
        self._poll = poll
        self.advancing: dict[Advancing, int] = {}  # number of operations in flight of each

    def __call__(self) -> None:
        self._poll()
        for each in list(self.advancing):
            each.advance()


class _Thread:
    """Thread that polls while `busy` is set."""

    def __init__(self, poll: Callable[[], None]) -> None:
        self.busy = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(poll, self.busy, self._over), name="pydist progress", daemon=True
        )
        # A transport that was not closed must not keep polling a finalized library.
        self.close = weakref.finalize(self, _end, self._thread, self.busy, self._over)
        self._thread.start()


def _run(poll: Callable[[], None], busy: threading.Event, over: threading.Event) -> None:
    while busy.wait() and not over.wait(INTERVAL_S):
        poll()


def _end(thread: threading.Thread, busy: threading.Event, over: threading.Event) -> None:
    over.set()
    busy.set()
    thread.join()
