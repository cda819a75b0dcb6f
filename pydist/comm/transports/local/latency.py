"""An artificial latency for the `local` transport, to test what overlap hides."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence


class Latency:
    """Artificial delay that all ranks of one hub have between sending and arrival.

    Bytes are copied as usual; `wait` and the like sleep until at least `seconds` after the message
    was sent. So tests and experiments can measure what overlap hides.
    """

    def __init__(self, seconds: float) -> None:
        """Delays every message by `seconds`."""
        self.seconds = seconds
        self._lock = threading.Lock()
        # Send times of messages in flight, by (group, source, destination, tag).
        self._sent: defaultdict[tuple[int, int, int, int], deque[float]] = defaultdict(deque)
        # Time at which the latest rank has joined a collective, and the number of ranks done.
        self._joined: dict[tuple[int, int], tuple[float, int]] = {}

    def send(self, group: int, source: int, dest: int, tag: int) -> None:
        """Notes that a message is about to be sent.

        Args:
            group: number of the group.
            source: the sender's rank in the group.
            dest: the receiver's rank in the group.
            tag: of the message.
        """
        with self._lock:
            self._sent[group, source, dest, tag].append(time.perf_counter())

    def receive(self, group: int, dest: int, tag: int, sources: Sequence[int]) -> None:
        """Waits until the messages from `sources`, already received, would have arrived.

        Args:
            group: number of the group.
            dest: the receiver's rank in the group.
            tag: of the messages.
            sources: the senders' ranks, once per message.
        """
        with self._lock:
            sent = [self._sent[group, source, dest, tag].popleft() for source in sources]
        self._sleep(max(sent, default=0.0))

    def join(self, group: int, number: int) -> None:
        """Notes that a rank is about to start the `number`-th collective of a group."""
        with self._lock:
            _, seen = self._joined.get((group, number), (0.0, 0))
            self._joined[group, number] = time.perf_counter(), seen

    def finish(self, group: int, number: int, size: int) -> None:
        """Waits until the result of a collective of `size` ranks, all joined, would be ready.

        Args:
            group: number of the group.
            number: of the collective in the group.
            size: number of ranks that call `finish` for it.
        """
        with self._lock:
            last, seen = self._joined[group, number]
            self._joined[group, number] = last, seen + 1
            if seen + 1 == size:
                del self._joined[group, number]
        self._sleep(last)

    def _sleep(self, sent: float) -> None:
        time.sleep(max(0.0, sent + self.seconds - time.perf_counter()))
