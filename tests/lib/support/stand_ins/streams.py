"""A device with streams that computes nothing: its events have times of its own making."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(eq=False)
class Event:
    """Reached when the device has come to `time`."""

    time: float


class SimulatedDevice:
    """Streams that are given work of known lengths, which the host never waits for.

    Attributes:
        at: when each stream is through with what it has, in seconds.
        current: the stream that the host gives work to.
        capturing: whether that goes into a graph instead.
        clock: how far the device has come; the host sees events only up to there.
        waits: how often the host has waited.
        freed: the events handed back.
        ranges: those that are open.
    """

    def __init__(self) -> None:
        self.at: defaultdict[int, float] = defaultdict(lambda: 1000.0)
        self.current = 0
        self.capturing = False
        self.clock = 1000.0
        self.waits = 0
        self.recorded: list[Event] = []
        self.freed: list[Event] = []
        self.ranges: list[str] = []
        self.all_ranges: list[str] = []

    def busy(self, seconds: float, stream: int | None = None) -> None:
        """Gives a stream work."""
        self.at[self.current if stream is None else stream] += seconds

    def wait_for(self, stream: int, waiting: int | None = None) -> None:
        """A stream, by default the current one, goes on behind what another has been given."""
        waiting = self.current if waiting is None else waiting
        self.at[waiting] = max(self.at[waiting], self.at[stream])

    def record(self, stream: int | None = None) -> tuple[Event, int] | None:
        if self.capturing:
            return None
        stream = self.current if stream is None else stream
        self.recorded.append(Event(self.at[stream]))
        return self.recorded[-1], stream

    def seconds(self, start: Event, stop: Event) -> float:
        assert max(start.time, stop.time) <= self.clock, "the device has not come so far"
        return stop.time - start.time

    def reached(self, event: Event) -> bool:
        return event.time <= self.clock

    def wait(self, event: Event) -> None:
        if not self.reached(event):
            self.waits += 1
            self.clock = event.time

    def free(self, event: Event) -> None:
        self.freed.append(event)

    def push(self, name: str) -> None:
        self.ranges.append(name)
        self.all_ranges.append(name)

    def pop(self) -> None:
        self.ranges.pop()
