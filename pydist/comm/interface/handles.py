"""What a transport returns for an operation that goes on while the caller does other things."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Work:
    """An operation under way. The buffers belong to it until `wait` has returned."""

    def wait(self) -> None:
        """Return when the operation is complete; its result is then in place. Idempotent.

        Raises:
            RankFailed: another rank failed, the result will never come.
        """

    def done(self) -> bool:
        """Whether `wait` would return at once; False as well where that is not known."""
        return False


class Channel(ABC):
    """A set of messages with fixed peers and fixed buffers, sent again and again.

    One `start` and one `wait` make a round; the buffers must not be touched between the two.
    """

    stream: int | None = None
    """The CUDA stream that carries the messages, if one does."""

    @abstractmethod
    def start(self) -> None:
        """Start all sends and receives. Does not block."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all receives of the round have arrived and the send buffers are free.

        Raises:
            RankFailed: another rank failed, a message will never come.
        """

    def close(self) -> None:  # noqa: B027  a channel may hold nothing
        """Release what the channel holds. Idempotent; not between `start` and `wait`."""
