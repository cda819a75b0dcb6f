"""An artificial latency for the `local` transport, to see in tests what overlap hides."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence


class Latency:
    """An artificial time between sending and arrival, for all ranks of one hub.

    Bytes are copied as ever; `wait` and its like return no sooner than `seconds` after what they
    wait for was sent, and meanwhile sleep. So tests and experiments see what overlap hides.
    """

    def __init__(self, seconds: float) -> None:
        """Delay everything by so many seconds."""
        self.seconds = seconds
        self._lock = threading.Lock()
        # When the messages under way were sent, by (group, source, destination, tag).
        self._sent: defaultdict[tuple[int, int, int, int], deque[float]] = defaultdict(deque)
        # When the last rank so far joined a collective, and how many have seen its end.
        self._joined: dict[tuple[int, int], tuple[float, int]] = {}

    def send(self, group: int, source: int, dest: int, tag: int) -> None:
        """A message is about to be sent."""
        with self._lock:
            self._sent[group, source, dest, tag].append(time.perf_counter())

    def receive(self, group: int, dest: int, tag: int, sources: Sequence[int]) -> None:
        """One message from each of `sources` is here; returns when all would have arrived."""
        with self._lock:
            sent = [self._sent[group, source, dest, tag].popleft() for source in sources]
        self._sleep(max(sent, default=0.0))

    def join(self, group: int, number: int) -> None:
        """A rank is about to start the `number`-th collective of a group."""
        with self._lock:
            _, seen = self._joined.get((group, number), (0.0, 0))
            self._joined[group, number] = time.perf_counter(), seen

    def finish(self, group: int, number: int, size: int) -> None:
        """All `size` ranks have joined a collective; returns when its result would be here."""
        with self._lock:
            last, seen = self._joined[group, number]
            self._joined[group, number] = last, seen + 1
            if seen + 1 == size:
                del self._joined[group, number]
        self._sleep(last)

    def _sleep(self, sent: float) -> None:
        time.sleep(max(0.0, sent + self.seconds - time.perf_counter()))
