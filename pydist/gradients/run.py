"""A run of torch's engine, as the reducer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydist.group_sizes import GroupSizes, weights_of

if TYPE_CHECKING:
    from pydist.gradients.leaf import Leaf
    from pydist.mesh import Mesh


class Run:
    """A run of torch's engine over a graph with members or sharded tensors.

    Args:
        mesh: the mesh.
        roots: the nodes of the graph where it starts.
        sizes: of the batch whose outputs have no graph, if that was the last one.
        accumulates: whether gradients go to `.grad`; else `autograd.grad` returns them.

    Attributes:
        reaches_none: whether it is known to reach no member.
        complete: whether the gradients were reduced.
        added: the members whose gradients it has added to.
        arrived: what gradients weigh that `autograd.grad` returns, by the key of the member.
    """

    def __init__(
        self, mesh: Mesh, roots: Sequence[Any], sizes: GroupSizes | None, *, accumulates: bool
    ) -> None:
        self.accumulates, self._roots, self._sizes = accumulates, roots, sizes
        self._weights = weights_of(mesh) if mesh.data_size > 1 else None
        self.added: list[Leaf] = []
        self.reaches_none = self.complete = False
        self.arrived: dict[int, float] = {}

    @property
    def weight(self) -> float:
        """What the gradients of this rank's sample group weigh."""
        return 1.0 if self._weights is None else self._weights.weight(self._roots, self._sizes)
