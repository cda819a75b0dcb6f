"""Defines `EngineRun`, the reducer's state of one run of torch's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydist.group_sizes import GroupSizes, weights_of

if TYPE_CHECKING:
    from pydist.gradients.leaf import Leaf
    from pydist.mesh import Mesh


class EngineRun:
    """Run that torch's engine makes over a graph with members or sharded tensors.

    Args:
        mesh: the mesh.
        roots: the nodes of the graph where the run starts.
        sizes: of the last batch, if its outputs have no graph.
        accumulates: whether gradients go to `.grad`; else `autograd.grad` returns them.

    Attributes:
        reaches_none: whether the run is known to reach no member.
        complete: whether the gradients were reduced.
        added: the members to whose gradients the run has added.
        arrived: weights of the gradients that `autograd.grad` returns, by the key of the member.
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
        """Weight that this rank's sample group has."""
        return 1.0 if self._weights is None else self._weights.weight(self._roots, self._sizes)
