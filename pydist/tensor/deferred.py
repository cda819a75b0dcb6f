"""Work on a shard that is deferred until the shard is used; `pydist.ops.fusion` has the kinds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pydist.exchange.exchanger import order_streams


class Deferred:
    """The state of a new shard that was not handed out; subclasses hold deferred work on it.

    No other tensor that can be changed shares the memory of such a shard. Deferred work reads only
    such shards, and copies of everything else, so a change between a call and its completion has
    no effect. Completion is rank-local: no message depends on its time. On CUDA the work is done on
    the stream of the call, for which those wait that use the shard.
    """

    def complete(self) -> torch.cuda.Stream | None:
        """Does the deferred work; nothing if it has been done.

        Returns:
            The stream of the work; `None` if there is none.
        """
        return None

    def with_relu(
        self, shard: Tensor, negative_slope: float
    ) -> tuple[Tensor, Deferred | None] | None:
        """Fuses the deferred work with a ReLU in place.

        Args:
            shard: the shard, in the graph.
            negative_slope: 0 for a ReLU; in [0, 1).

        Returns:
            The new shard, and its remaining deferred work; `None` if the two can't be fused.
        """
        return None


def with_current(
    streams: Sequence[torch.cuda.Stream], shard: Tensor
) -> Sequence[torch.cuda.Stream]:
    """Lets the current stream wait for the first of some streams, unless it is one of them.

    Returns:
        The streams, and the current one.
    """
    now = torch.cuda.current_stream(shard.device)
    if now in streams:
        return streams
    order_streams(streams[0], now)
    return [*streams, now]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Puts the block's work on a stream; `None` for work on a CPU."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


NOTHING = Deferred()
"""The state of a shard in new memory for which no work is deferred."""
