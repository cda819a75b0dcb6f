"""What is still to be done for a shard before it may be used; `pydist.ops.fusion` has the kinds."""

from __future__ import annotations

from torch import Tensor


class Deferred:
    """Nothing is to be done: the shard is new, and has not been handed out. Subclasses do more.

    No other tensor that can be changed shares the memory of such a shard. What waits reads only
    such shards, and copies of everything else, so that no change between a call and its completion
    can be noticed. When a rank completes it is its own affair: no message depends on it.
    """

    def complete(self) -> None:
        """Does it; nothing when it has been done."""

    def with_relu(
        self, shard: Tensor, negative_slope: float
    ) -> tuple[Tensor, Deferred | None] | None:
        """Does it along with a ReLU in place.

        Args:
            shard: the shard, in the graph.
            negative_slope: 0 for a ReLU; in [0, 1).

        Returns:
            The new shard, and what is still to be done for it; `None` if that can't be.
        """
        return None


NOTHING = Deferred()
"""What a shard in new memory waits for."""
