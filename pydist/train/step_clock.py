"""Measures the parts of a step's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydist.timers import COMPUTATION

if TYPE_CHECKING:
    from pydist.timers import Timers


class StepClock:
    """Clock that splits the time between `start` and `stop` into the parts of a step.

    Args:
        timers: the timers of the mesh; see `Timers` for the parts.
        waited: returns the seconds spent waiting for data so far.
    """

    def __init__(self, timers: Timers, waited: Callable[[], float]) -> None:
        self._timers = timers
        self._waited = waited
        self.start()

    def start(self) -> None:
        """Starts the measurement of a step."""
        self._began = time.perf_counter()
        self._before = self._read()

    def stop(self) -> tuple[float, dict[str, float]]:
        """Ends the measurement of a step.

        Returns:
            Its seconds, in total and by part; "compute" is the remainder after communication and
            waiting.
        """
        seconds = time.perf_counter() - self._began
        spent = {name: now - self._before.get(name, 0.0) for name, now in self._read().items()}
        for part in COMPUTATION:  # timed in part by layers; here computation is the remainder
            spent.pop(part, None)
        return seconds, {"compute": max(seconds - sum(spent.values()), 0.0), **spent}

    def _read(self) -> dict[str, float]:
        return {**self._timers.snapshot(), "data": self._waited()}
