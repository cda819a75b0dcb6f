"""Records one rank's spans."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from pydist.profile.clock import DeviceClock, DeviceSpan, StreamMark
from pydist.profile.spans import HALO_WAIT, IN_FLIGHT, Span, in_backward
from pydist.timers import Arriving


class Flight(NamedTuple):
    """Halo that is in flight between `launch` and its arrival."""

    layer: str
    posted: float
    mark: StreamMark | None


class SpanRecorder:
    """Recorder that keeps spans in the order of their ends, nested ones before their outer one.

    See `pydist.timers.SpanSink` for the methods.

    Args:
        clock: records the same spans on the rank's device; `None` for the host.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self.spans: list[Span] = []
        self._clock = clock

    def begin(self, part: str, layer: str) -> DeviceSpan | None:
        """Begins a span."""
        if self._clock is None or part == "profiler":  # the profiler does no device work
            return None
        return self._clock.begin(part, layer)

    def end(
        self, begun: DeviceSpan | None, part: str, layer: str, start: float, stop: float, own: float
    ) -> None:
        """Ends a span."""
        self.spans.append(Span(part, layer, in_backward(), start, stop, own))
        if self._clock is not None and begun is not None:
            self._clock.end(begun)

    def launch(self, layer: str) -> Flight:
        """Records that a halo is posted."""
        return Flight(layer, perf_counter(), None if self._clock is None else self._clock.mark())

    def land(self, flight: Flight, channel: Arriving) -> None:
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
