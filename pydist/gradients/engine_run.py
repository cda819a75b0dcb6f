"""Defines `EngineRun`, the reducer's state of one run of torch's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pydist.exchange.consistency import consistency_of
from pydist.gradients import graph
from pydist.gradients.leaf import Leaf, leaf_of
from pydist.group_sizes import GroupSizes, weights_of

if TYPE_CHECKING:
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
        self._mesh, self._roots, self._sizes = mesh, roots, sizes
        self.accumulates = accumulates
        self._weights = weights_of(mesh) if mesh.data_size > 1 else None
        self.added: list[Leaf] = []
        self.reaches_none = self.complete = False
        self.arrived: dict[int, float] = {}

    @property
    def weight(self) -> float:
        """Weight that this rank's sample group has."""
        return 1.0 if self._weights is None else self._weights.weight(self._roots, self._sizes)

    def means(self, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Replaces members' gradients in the results of `autograd.grad` by means. Collective.

        Not when they arrive, as hooks may change the order on a rank.

        Args:
            inputs: tensors, or edges of the graph, whose gradients the program requested.
            results: the gradients of this rank.
        """
        found = list(results)
        for index, each in enumerate(inputs):
            tensor = each if isinstance(each, Tensor) else getattr(each.node, "variable", None)
            leaf = None if tensor is None else leaf_of(tensor)
            reducer = None if leaf is None else leaf.reducer()
            if leaf is None or reducer is None or reducer.mesh is not self._mesh:
                continue
            if leaf.key not in self.arrived:
                continue
            mean = mean_of_member(leaf, found[index], self._mesh, self.arrived[leaf.key])
            if found[index] is not None:
                found[index] = leaf.seen_by_hooks(mean)
        if self.arrived:
            consistency_of(self._mesh).compare_histories(self._mesh)
        return tuple(found)


def mean_of_member(leaf: Leaf, grad: Tensor | None, mesh: Mesh, weight: float) -> Tensor:
    """Returns the mean of a member's gradient; None counts as zero. Collective, differentiable."""
    own = leaf.kind.zeros() if grad is None else grad  # another rank may have one
    return graph.mean_of(own, mesh, leaf.axes, weight)
