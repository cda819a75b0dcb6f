"""Defines the spans of a profile: timed activities of a rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

IN_FLIGHT = "halo in flight"
HALO_WAIT = "halo wait"
"""Part of a device: its stream's waiting for a halo; the rest of "halo" there is unpacking."""

PASS, TRANSFER = "pass", "transfer"
"""Parts of stages: a pass of a micro-batch, and waiting for another stage within it."""


class Span(NamedTuple):
    """Activity of a rank that was timed; see `pydist.timers.Timers` for the parts."""

    part: str
    layer: str
    """Path of the module, "" if none."""
    backward: bool
    start: float
    """`time.perf_counter` of the rank; of rank 0 after gathering."""
    stop: float
    own: float
    """Seconds without nested spans; 0 for a span concurrent to the others."""
    stream: int = 0
    """0 for the host; else a stream of the device, `MAIN_STREAM` for the steps' own."""

    def shifted(self, seconds: float) -> Span:
        """Returns the span in a clock that is ahead by `seconds`."""
        return self._replace(start=self.start + seconds, stop=self.stop + seconds)


def in_backward() -> bool:
    """Returns whether autograd's engine is running in this thread."""
    return bool(torch._C._current_graph_task_id() >= 0)
