"""An artificial latency for the `local` transport, to test what overlap hides."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from pydist.comm import Channel, LocalTransport, Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.transports.local import threads, transport


class Latency:
    """Artificial delay that all ranks of one hub have between sending and arrival.

    Bytes are copied as usual; `wait` and the like sleep until at least `seconds` after the message
    was sent.
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


@contextmanager
def delayed(latency: Latency) -> Iterator[None]:
    """Delays the messages of all ranks that `run_local` starts in the `with` block."""

    def make(*args: Any, **kwargs: Any) -> _DelayedTransport:
        return _DelayedTransport(latency, *args, **kwargs)

    with (
        mock.patch.object(threads, "LocalTransport", make),
        mock.patch.object(transport, "LocalTransport", make),  # makes groups
    ):
        yield


class _DelayedTransport(LocalTransport):
    def __init__(self, latency: Latency, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._latency, self._collectives = latency, 0

    def _channel(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> Channel:
        return _DelayedChannel(self, super()._channel(sends, recvs, tag), sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        self._latency.send(self._group, self.rank, dest, tag)
        super()._send(tensor, dest, tag)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        super()._recv(tensor, source, tag)
        self._latency.receive(self._group, self.rank, tag, [source])

    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        number = self._join()
        return _DelayedWork(self, super()._all_reduce_async(tensor, op), number)

    def _exchange_async(
        self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
    ) -> Work:
        number = self._join()
        return _DelayedWork(self, super()._exchange_async(inputs, outputs), number)

    def _join(self) -> int:
        """Returns the number of the collective to be started, identical on all ranks."""
        self._collectives += 1
        self._latency.join(self._group, self._collectives)
        return self._collectives


class _DelayedWork(Work):
    def __init__(self, owner: _DelayedTransport, work: Work, number: int) -> None:
        self._owner, self._work, self._number = owner, work, number
        self._is_over = False

    def wait(self) -> None:
        self._work.wait()
        if not self._is_over:
            self._is_over = True
            self._owner._latency.finish(self._owner._group, self._number, self._owner.size)


class _DelayedChannel(Channel):
    def __init__(
        self,
        owner: _DelayedTransport,
        channel: Channel,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._owner, self._channel, self._tag = owner, channel, tag
        self._dests = [peer for peer, _ in sends]
        self._sources = [peer for peer, _ in recvs]

    def start(self) -> None:
        for dest in self._dests:
            self._owner._latency.send(self._owner._group, self._owner.rank, dest, self._tag)
        self._channel.start()

    def wait(self) -> None:
        self._channel.wait()
        self._owner._latency.receive(self._owner._group, self._owner.rank, self._tag, self._sources)
