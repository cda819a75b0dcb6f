"""Brings the blocks of one batch: from disk, from other ranks, to other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pydist.data.store.directory import Moves
from pydist.data.store.entry import Entry
from pydist.data.store.source import BatchSource

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Channel

_under_way: set[Channel] = set()
"""Channels whose messages may still read or write the memory that they refer to."""


class Delivery:
    """Delivery that brings the blocks of one batch: held here, on their way, and in files.

    Attributes:
        moves: where the blocks come from.
        source: reads them, after `arrive`.
        staged: entries to be sent, on their way from disk.
        sent: entries that are being sent.
        ended: set when nothing is read of the delivery anymore; None if no one waits for that.
    """

    def __init__(
        self,
        moves: Moves,
        source: BatchSource,
        begin: Callable[[Delivery], tuple[Channel | None, Callable[[], None]]],
        unstage: Callable[[Delivery], None],
    ) -> None:
        self.moves = moves
        self.source = source
        self.staged: dict[int, Future[Entry | None]] = {}
        self.sent: dict[int, Entry] = {}
        self.ended: threading.Event | None = None
        self.has_started = False
        self._begin, self._unstage = begin, unstage
        self._channel: Channel | None = None
        self._release: Callable[[], None] = _nothing

    def start(self) -> None:
        """Starts the messages, unless they have been."""
        if self.has_started:
            return
        self.has_started = True
        self._channel, self._release = self._begin(self)
        if self._channel is not None:
            _under_way.add(self._channel)
            self._channel.start()

    def arrive(self) -> None:
        """Waits until the messages of this batch were received and sent."""
        self.start()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.wait()
            channel.close()
            _under_way.discard(channel)
        self.withdraw()

    def withdraw(self) -> None:
        """Releases the entries that were read from disk to be sent."""
        if self.staged:
            self._unstage(self)
        for future in self.staged.values():
            future.cancel()
        self.staged.clear()
        self.sent.clear()

    def end(self) -> None:
        """Gives the buffer of received blocks back to the store, after the last read."""
        release, self._release = self._release, _nothing
        release()
        if self.ended is not None:
            self.ended.set()


def _nothing() -> None:
    pass
