"""Collectives of a group that count the bytes they send, and exchanges of several messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydist.comm.interface.handles import Work

if TYPE_CHECKING:
    from torch import Tensor

    from pydist.comm.interface.transport import Transport


class Messages:
    """Collectives of a group, with the bytes that this rank sends.

    An all-reduce counts as a reduce-scatter and an all-gather, which is the least that each rank
    of a group sends: 2 (N - 1) / N of the tensor.

    Attributes:
        transport: the group.
        later: the same ranks, for messages of a bucket after the first one; None for one group.
        rank: index of this rank in the group.
        size: number of ranks of the group.
        sent: bytes that this rank has sent so far.
    """

    def __init__(self, transport: Transport, later: Transport | None = None) -> None:
        self.transport, self.later = transport, later
        self.rank, self.size = transport.rank, transport.size
        self.sent = 0
        self._begins = False

    def renewed(self) -> Messages:
        """Returns the collectives of the same group for another form."""
        return Messages(self.transport, self.later)

    @property
    def transports(self) -> list[Transport]:
        """One or two transports that connect these ranks."""
        return [each for each in (self.transport, self.later) if each is not None]

    def begin(self) -> None:
        """Declares that the next message is the first one of a bucket in this group."""
        self._begins = True

    def _group(self) -> Transport:
        begins, self._begins = self._begins, False
        return self.transport if begins or self.later is None else self.later

    def all_reduce(self, tensor: Tensor) -> Work:
        """Starts a sum over the ranks, in place; see `Transport.all_reduce_async`."""
        self.sent += 2 * tensor.nbytes * (self.size - 1) // self.size
        return self._group().all_reduce_async(tensor)

    def reduce_scatter(
        self, tensor: Tensor, out: Tensor, counts: Sequence[int], divisor: int = 1
    ) -> Work:
        """Starts a reduce-scatter; see `Transport.reduce_scatter_async`."""
        self.sent += tensor.nbytes - out.nbytes
        return self._group().reduce_scatter_async(tensor, out, counts, divisor)

    def all_gather(self, tensor: Tensor, out: Tensor, counts: Sequence[int]) -> Work:
        """Starts to collect the intervals of all ranks; see `all_gather_async`."""
        self.sent += tensor.nbytes * (self.size - 1)
        return self._group().all_gather_async(tensor, out, counts)


class Final(Work):
    """Message that ends a `Sequel`."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def done(self) -> bool:
        """Returns whether the message is complete; see `Work.done`."""
        return self._work.done()

    def wait(self) -> None:
        """Waits for the message; see `Work.wait`."""
        self._work.wait()


class Sequel(Work):
    """Messages that depend on each other, such as a sum and its distribution.

    The first one starts with the object. The others start in `advance`, which never waits, or in
    `wait`: if it waited earlier, a rank could keep others, which start their buckets late, from
    exchanges that they make before. `done` differs between ranks, so it decides when a message
    starts, and not the order in a group: objects advance one after the other, each to its last
    message, and first ones, which start meanwhile, have a group of their own (`Messages.begin`).
    """

    def __init__(self, messages: Iterator[Work]) -> None:
        """Starts the first message.

        Args:
            messages: starts a message each time that the one before is complete.
        """
        self._messages = messages
        self._work = next(messages, None)

    def wait(self) -> None:
        """Runs all remaining messages, one after the other; see `Work.wait`."""
        while self._work is not None:
            self._step()

    def advance(self) -> bool:
        """Starts messages whose predecessors are complete; returns whether all have started."""
        while self._work is not None and not isinstance(self._work, Final) and self._work.done():
            self._step()
        return self._work is None or isinstance(self._work, Final)

    def _step(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = next(self._messages, None)


def even_counts(elements: int, parts: int) -> list[int]:
    """Divides a row into intervals; the first ones are equal, and the last ones may be empty."""
    chunk = -(-elements // parts)
    points = [min(i * chunk, elements) for i in range(parts + 1)]
    return [b - a for a, b in itertools.pairwise(points)]
