"""Work on a shard that is deferred until the shard is used; `pydist.ops.fusion` has the kinds."""

from __future__ import annotations

from torch import Tensor


class Deferred:
    """The state of a new shard that was not handed out; subclasses hold deferred work on it.

    No other tensor that can be changed shares the memory of such a shard. Deferred work reads only
    such shards, and copies of everything else, so a change between a call and its completion has
    no effect. Completion is rank-local: no message depends on its time.
    """

    def complete(self) -> None:
        """Does the deferred work; nothing if it has been done."""

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


NOTHING = Deferred()
"""The state of a shard in new memory for which no work is deferred."""
