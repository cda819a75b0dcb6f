"""The spans of one rank."""

from __future__ import annotations

from typing import NamedTuple

import torch


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

    def shifted(self, seconds: float) -> Span:
        """The same span by a clock that shows so much more."""
        return self._replace(start=self.start + seconds, stop=self.stop + seconds)


class SpanRecorder:
    """Keeps spans in the order in which they end, so a nested one precedes what it lies in."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, part: str, layer: str, start: float, stop: float, own: float) -> None:
        """See `pydist.timers.Recorder`."""
        self.spans.append(Span(part, layer, in_backward(), start, stop, own))


def in_backward() -> bool:
    """Whether autograd's engine is running in this thread."""
    return bool(torch._C._current_graph_task_id() >= 0)
