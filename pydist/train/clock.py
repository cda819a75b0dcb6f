"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydist.timers import COMPUTATION

if TYPE_CHECKING:
    from pydist.timers import Timers


class StepClock:
    """Splits the time between `start` and `stop` into the parts of a step.

    Args:
        timers: what the mesh measures; see `Timers` for the parts.
        waited: seconds spent waiting for data so far.
    """

    def __init__(self, timers: Timers, waited: Callable[[], float]) -> None:
        self._timers = timers
        self._waited = waited
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()
        self._before = self._read()

    def stop(self) -> tuple[float, dict[str, float]]:
        """A step ends.

        Returns:
            Its seconds, and by part: "compute" is what is neither communication nor waiting.
        """
        seconds = time.perf_counter() - self._began
        spent = {name: now - self._before.get(name, 0.0) for name, now in self._read().items()}
        for part in COMPUTATION:  # layers measure some of it themselves; here it is the rest
            spent.pop(part, None)
        return seconds, {"compute": max(seconds - sum(spent.values()), 0.0), **spent}

    def _read(self) -> dict[str, float]:
        return {**self._timers.snapshot(), "data": self._waited()}
