"""The spans of one rank."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from pydist.comm import Channel
    from pydist.profile.clock import DeviceClock, DeviceSpan, Mark

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


class Flight(NamedTuple):
    """A halo on its way."""

    layer: str
    posted: float
    mark: Mark | None


class SpanRecorder:
    """Keeps spans in the order in which they end, so a nested one precedes what it lies in.

    See `pydist.timers.Recorder` for the methods.

    Args:
        clock: records the same on the rank's device; `None` where it computes on the host.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self.spans: list[Span] = []
        self._clock = clock

    def begin(self, part: str, layer: str) -> DeviceSpan | None:
        """A span begins."""
        if self._clock is None or part == "profiler":  # that is nothing to the device
            return None
        return self._clock.begin(part, layer)

    def end(
        self, begun: DeviceSpan | None, part: str, layer: str, start: float, stop: float, own: float
    ) -> None:
        """A span has ended."""
        self.spans.append(Span(part, layer, in_backward(), start, stop, own))
        if self._clock is not None and begun is not None:
            self._clock.end(begun)

    def launch(self, layer: str) -> Flight:
        """A halo is posted."""
        return Flight(layer, perf_counter(), None if self._clock is None else self._clock.mark())

    def land(self, flight: Flight, channel: Channel) -> None:
        """Waits for a halo."""
        if self._clock is None:
            channel.wait()
        else:
            waiting = self._clock.begin(HALO_WAIT, flight.layer)
            channel.wait()
            self._clock.end(waiting)
            self._clock.flight(flight.layer, flight.mark, channel.stream)
        stop = perf_counter()
        span = Span(IN_FLIGHT, flight.layer, in_backward(), flight.posted, stop, 0.0)
        self.spans.append(span)


def in_backward() -> bool:
    """Whether autograd's engine is running in this thread."""
    return bool(torch._C._current_graph_task_id() >= 0)
