"""Handles of operations that run asynchronously to the caller."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Work:
    """Operation in flight, which owns its buffers until `wait` has returned."""

    def wait(self) -> None:
        """Returns when the operation is complete and its result in place. Idempotent.

        Raises:
            RankFailed: another rank failed, so the result never arrives.
        """

    def done(self) -> bool:
        """Returns whether `wait` would return immediately; False where that is unknown."""
        return False


class Channel(ABC):
    """Set of messages that repeat with fixed peers and fixed buffers.

    One `start` and one `wait` make a round; the buffers must not be accessed in between.
    """

    stream: int | None = None
    """The CUDA stream that carries the messages; None without one."""

    @abstractmethod
    def start(self) -> None:
        """Starts all sends and receives. Does not block."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when all receives of the round have arrived and the send buffers are free.

        Raises:
            RankFailed: another rank failed, so a message never arrives.
        """

    def close(self) -> None:  # noqa: B027  a channel may hold nothing
        """Releases the channel's resources. Idempotent; not between `start` and `wait`."""
