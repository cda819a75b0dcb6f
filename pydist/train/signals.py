"""The signals that ask a run to save and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from pydist.errors import Stopped
from pydist.launch.signal_handlers import handled

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, kill, and SLURM's signal before the time limit (``--signal=USR1@180``)."""


class StopRequest:
    """First stop signal, which the loop checks between two steps.

    A rank must not stop on its own: the others would wait for it. So the handler only notes the
    signal, and the ranks agree at the end of the step. A second Ctrl-C interrupts immediately.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def received(self) -> bool:
        """Whether a stop signal has arrived at this rank."""
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handles the signals within the `with` block; does nothing outside the main thread."""
        with handled(SIGNALS, self._note):
            yield self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)


_AGAIN = 0.1
"""Seconds after which a signal that has arrived during an import comes again."""


class Ending(BaseException):
    """Raised by a signal's handler; no `Exception`, which some code catches and drops."""


def _imports(frame: FrameType | None) -> bool:
    """Returns whether a frame is part of an import."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Lets the signals of batch systems end a run immediately within the block, except in steps.

    While a run starts, and while it writes its results, there is no step to finish and nothing to
    save. It ends with the code of a stopped run, which batch scripts restart, unlike a lost rank.

    Raises:
        Stopped: one has arrived.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if _imports(frame):  # packages catch all errors of imports, and would go on without
            again = threading.Timer(_AGAIN, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        name = signal.Signals(number).name
        raise Ending(f"stopped by {name} before or after training; the same command resumes")

    try:
        with handled((signal.SIGTERM, signal.SIGUSR1), end):
            yield
    except Ending as ending:
        raise Stopped(str(ending)) from None
