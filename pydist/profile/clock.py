"""Times a rank's spans on its device, by events around them, in the host's clock.

The host only enqueues work, so its own times are times of enqueueing. This module records an event
on the current stream when a span begins and another when it ends. It reads them when the device has
reached them, without waiting before the end of the profile, and aligns them to the host's clock by
one event that it waits for at the start. Idle time of the device within a span counts for the span:
the host is then the bottleneck.

Nothing is recorded while a CUDA graph is captured: the events would be part of the graph and have
no time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pydist.errors import UsageError
from pydist.profile.spans import IN_FLIGHT, Span, in_backward

if TYPE_CHECKING:
    from pydist.profile.device import CudaDevice

_ROUNDS = 5
MAIN_STREAM = 1
"""`Span.stream` of the stream that the training steps run on."""


@dataclass(slots=True)
class StreamMark:
    """Point that the work of a stream has reached, and the anchor before it."""

    event: Any
    stream: int
    anchor: int


@dataclass(slots=True, eq=False)
class DeviceSpan:
    """Span that has not ended, or whose events the device has not reached yet."""

    outer: DeviceSpan | None
    start: StreamMark | None
    part: str
    layer: str
    backward: bool = False
    nested: float = 0.0


class DeviceClock:
    """Clock that times one rank's spans on its device.

    Args:
        device: the device; the constructor and `finish` wait for it.

    Attributes:
        bounds: times at which steps begin and end; complete after `finish`.
        spans: the spans that the device has completed, in `time.perf_counter` of the host.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.bounds: list[float] = []
        self.spans: list[Span] = []
        self._device = device
        self._open: DeviceSpan | None = None
        self._unread: deque[tuple[DeviceSpan, StreamMark, StreamMark]] = deque()
        self._streams: list[int] = []
        # Times are relative to the anchor before: a float32 of milliseconds has limited precision.
        self._anchors: list[Any] = []
        self._anchor_times: list[float] = []
        self._steps: list[int] = []
        self._set_to_host()

    def _set_to_host(self) -> None:
        best = float("inf")
        for _ in range(_ROUNDS):
            before = perf_counter()
            recorded = self._device.record()
            if recorded is None:
                raise UsageError("a profile can't begin while a CUDA graph is captured")
            self._device.wait(recorded[0])
            after = perf_counter()
            if after - before < best:
                best = after - before
                self._anchors, self._anchor_times = [recorded[0]], [(before + after) / 2]

    def begin(self, part: str, layer: str) -> DeviceSpan:
        """Begins a span on the current stream; returns the argument for `end`."""
        self._device.push(f"{layer} {part}" if layer else part)
        self._open = DeviceSpan(self._open, self.mark(), part, layer)
        return self._open

    def end(self, span: DeviceSpan) -> None:
        """Ends a span on the current stream, and nested spans that an exception has left open."""
        if not self._is_open(span):
            return
        while self._open is not span:
            self._close()
        self._close()
        stop = self.mark()
        span.backward = in_backward()
        if span.start is not None and stop is not None:
            self._unread.append((span, span.start, stop))

    def _is_open(self, span: DeviceSpan) -> bool:
        each = self._open
        while each is not None and each is not span:
            each = each.outer
        return each is span

    def _close(self) -> None:
        if self._open is not None:
            self._device.pop()
            self._open = self._open.outer

    def mark(self, stream: int | None = None) -> StreamMark | None:
        """Records a point in the work of a stream, by default the current one."""
        recorded = self._device.record(stream)
        return None if recorded is None else StreamMark(*recorded, len(self._anchors) - 1)

    def flight(self, layer: str, start: StreamMark | None, stream: int | None) -> None:
        """Records a halo in flight from `start` until the work of `stream` so far is done.

        Args:
            layer: path of the module that the halo belongs to.
            start: where it was posted; `None` while a graph is captured.
            stream: of the messages; `None` for the current one.
        """
        stop = self.mark(stream)
        if start is not None and stop is not None:
            span = DeviceSpan(None, start, IN_FLIGHT, layer, in_backward())
            self._unread.append((span, start, stop))

    def step(self) -> None:
        """Ends a step on the current stream, and begins the next."""
        recorded = self._device.record()
        if recorded is not None:
            self._anchors.append(recorded[0])
            if not self._steps:
                self._streams = [recorded[1]]
            self._steps.append(len(self._anchors) - 1)
        self._read(wait=False)

    def forget(self) -> None:
        """Drops everything recorded so far, which belongs to the warm-up."""
        self._read(wait=False)
        self._unread.clear()
        self.spans.clear()
        self._steps.clear()

    def finish(self) -> None:
        """Waits for the device and completes `bounds` and `spans`."""
        self._read(wait=True)
        self.bounds = [self._anchor_time(step) for step in self._steps]

    def _read(self, wait: bool) -> None:
        while self._unread:
            span, start, stop = self._unread[0]
            anchors = self._anchors[start.anchor], self._anchors[stop.anchor]
            events = (*anchors, start.event, stop.event)
            if wait:
                for event in events:
                    self._device.wait(event)
            elif not all(self._device.reached(event) for event in events):
                return
            self._unread.popleft()
            self._keep(span, start, stop)
            self._device.free(start.event)
            self._device.free(stop.event)

    def _keep(self, span: DeviceSpan, start: StreamMark, stop: StreamMark) -> None:
        began, ended = self._time(start), self._time(stop)
        own = 0.0 if span.part == IN_FLIGHT else ended - began - span.nested
        outer = span.outer
        if outer is not None and outer.start is not None and outer.start.stream == start.stream:
            outer.nested += ended - began
        number = self._number(stop.stream)
        self.spans.append(Span(span.part, span.layer, span.backward, began, ended, own, number))

    def _number(self, stream: int) -> int:
        if stream not in self._streams:
            self._streams.append(stream)
        return MAIN_STREAM + self._streams.index(stream)

    def _time(self, mark: StreamMark) -> float:
        anchor = self._anchors[mark.anchor]
        return self._anchor_time(mark.anchor) + self._device.seconds(anchor, mark.event)

    def _anchor_time(self, number: int) -> float:
        times, anchors = self._anchor_times, self._anchors
        for known in range(len(times), number + 1):
            self._device.wait(anchors[known])
            times.append(times[-1] + self._device.seconds(anchors[known - 1], anchors[known]))
        return times[number]
