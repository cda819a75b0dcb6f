"""Stopping on request: the signals that ask a run to save and end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the polite kill, and what SLURM sends ahead of the time limit (``--signal=USR1@180``)."""


class StopRequest:
    """Remembers the first stop signal, for the loop to see between two steps.

    A rank must not stop on its own: the others would wait for it. So the handler only notes the
    signal, and the ranks agree at the end of the step. A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def received(self) -> bool:
        """Whether a stop signal has arrived at this rank."""
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handles the signals within the `with` block; in a thread, which can't, does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
