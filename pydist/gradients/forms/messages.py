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
        rank: index of this rank in the group.
        size: number of ranks of the group.
        sent: bytes that this rank has sent so far.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.sent = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        """Starts a sum over the ranks, in place; see `Transport.all_reduce_async`."""
        self.sent += 2 * tensor.nbytes * (self.size - 1) // self.size
        return self.transport.all_reduce_async(tensor)

    def reduce_scatter(
        self, tensor: Tensor, out: Tensor, counts: Sequence[int], divisor: int = 1
    ) -> Work:
        """Starts a reduce-scatter; see `Transport.reduce_scatter_async`."""
        self.sent += tensor.nbytes - out.nbytes
        return self.transport.reduce_scatter_async(tensor, out, counts, divisor)

    def all_gather(self, tensor: Tensor, out: Tensor, counts: Sequence[int]) -> Work:
        """Starts to collect the intervals of all ranks; see `all_gather_async`."""
        self.sent += tensor.nbytes * (self.size - 1)
        return self.transport.all_gather_async(tensor, out, counts)


class Sequel(Work):
    """Messages that depend on each other, such as a sum and its distribution.

    The first one starts with the object. The others start in `wait`, so that ranks that start their
    buckets late, after other exchanges, never keep the others from those exchanges.
    """

    def __init__(self, messages: Iterator[Work]) -> None:
        """Starts the first message.

        Args:
            messages: starts a message each time that the one before is complete.
        """
        self._messages = messages
        self._work = next(messages, None)

    def wait(self) -> None:
        """See `Work.wait`."""
        while self._work is not None:
            self._work.wait()
            self._work = next(self._messages, None)


def even_counts(elements: int, parts: int) -> list[int]:
    """Divides a row into intervals; the first ones are equal, and the last ones may be empty."""
    chunk = -(-elements // parts)
    points = [min(i * chunk, elements) for i in range(parts + 1)]
    return [b - a for a, b in itertools.pairwise(points)]
