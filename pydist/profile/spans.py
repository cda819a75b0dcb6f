"""The spans of a profile: what a rank did, and when."""

from __future__ import annotations

from typing import NamedTuple

import torch

IN_FLIGHT = "halo in flight"
HALO_WAIT = "halo wait"
"""Of a device: what its stream waited for a halo; the rest of "halo" there is unpacking."""


class Span(NamedTuple):
    """Something that a rank did; see `pydist.timers.Timers` for the parts."""

    part: str
    layer: str
    """Path of the module, "" if none."""
    backward: bool
    start: float
    """`time.perf_counter` of the rank; of rank 0 once ranks are gathered."""
    stop: float
    own: float
    """Seconds that no nested span took; 0 for one that runs beside the others."""
    stream: int = 0
    """0 for the host; else of its device, `MAIN_STREAM` for the one that steps run on."""

    def shifted(self, seconds: float) -> Span:
        """The same span by a clock that shows so much more."""
        return self._replace(start=self.start + seconds, stop=self.stop + seconds)


def in_backward() -> bool:
    """Whether autograd's engine is running in this thread."""
    return bool(torch._C._current_graph_task_id() >= 0)
