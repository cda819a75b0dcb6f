"""A simulated device whose streams compute nothing, with simulated times of events."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(eq=False)
class Event:
    """Event that the device reaches at `time`, in seconds."""

    time: float


class SimulatedDevice:
    """Streams with work of known durations, which the host never waits for.

    Attributes:
        at: end of each stream's queued work, in seconds.
        current: the stream that the host queues work on.
        capturing: whether this work goes into a graph instead.
        clock: time of the device, in seconds; the host sees only earlier events.
        waits: number of the host's waits.
        freed: returned events.
        ranges: open ranges.
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
        """Queues work on a stream."""
        self.at[self.current if stream is None else stream] += seconds

    def wait_for(self, stream: int, waiting: int | None = None) -> None:
        """Makes a stream, by default the current one, wait for the work queued on another."""
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
