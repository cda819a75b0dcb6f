"""Takes the overlap out of communication, to measure what it gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from pydist.comm import Channel, Transport, Work

_COLLECTIVES = ("all_gather_async", "reduce_scatter_async", "all_reduce_async")


class _AwaitedChannel(Channel):
    """Channel whose messages are awaited as soon as they have started."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.stream = channel, channel.stream

    def start(self) -> None:
        self._channel.start()
        self._channel.wait()

    def wait(self) -> None:
        """Returns: the messages have arrived."""

    def close(self) -> None:
        self._channel.close()


@contextmanager
def without_overlap() -> Iterator[None]:
    """Awaits each halo and each reduction as soon as it has started, within the `with` block.

    The same messages and results; for all transports of this process whose channels are made in the
    block. Not for CUDA graphs, which have captured what overlaps.
    """
    kept = {name: getattr(Transport, name) for name in ("channel", *_COLLECTIVES)}

    @wraps(kept["channel"])
    def channel(
        self: Transport,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        return _AwaitedChannel(kept["channel"](self, sends, recvs, tag))

    def awaited(name: str) -> Any:
        @wraps(kept[name])
        def call(self: Transport, *arguments: Any, **named: Any) -> Work:
            work: Work = kept[name](self, *arguments, **named)
            work.wait()
            return work

        return call

    replaced = {"channel": channel, **{name: awaited(name) for name in _COLLECTIVES}}
    try:
        for name, function in replaced.items():
            setattr(Transport, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(Transport, name, function)
