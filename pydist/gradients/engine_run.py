"""Defines `EngineRun`, the reducer's state of one run of torch's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pydist.errors import NotSupported
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

    def leads_to(self, mesh: Mesh) -> bool:
        """Returns whether the graph contains results of calls on another mesh."""
        return graph.leads_to(self._roots, mesh)

    def means(
        self,
        inputs: Sequence[Any],
        results: Sequence[Any],
        register: Callable[[Tensor], None],
        *,
        allow_unused: bool,
    ) -> tuple[Any, ...]:
        """Replaces members' gradients in the results of `autograd.grad` by means. Collective.

        Not when they arrive, as hooks may change the order on a rank.

        Args:
            inputs: tensors, or edges of the graph, whose gradients the program requested.
            results: the gradients of this rank.
            register: makes a parameter a member.
            allow_unused: whether a result may be `None`, perhaps in some sample groups only.
        """
        found, mesh = list(results), self._mesh
        tensors: list[Any] = [
            x if isinstance(x, Tensor) else getattr(x.node, "variable", None) for x in inputs
        ]
        arrived = [i for i, x in enumerate(tensors) if self._has_arrived(x)]
        compared = allow_unused and mesh.data_size > 1
        if compared:
            # All parameters: another group's graph may have made one a member there only.
            asked = [i for i, x in enumerate(tensors) if isinstance(x, nn.Parameter)]
            arrived = _on_any_rank(asked, arrived, found, mesh)
        for i in arrived:
            if leaf_of(tensors[i]) is None:
                register(tensors[i])
            leaf = leaf_of(tensors[i])
            assert leaf is not None
            mean = mean_of_member(leaf, found[i], mesh, self.arrived.get(leaf.key, 1.0))
            if found[i] is not None or compared:
                found[i] = leaf.seen_by_hooks(mean)
        if arrived:
            consistency_of(mesh).compare_histories(mesh)
        return tuple(found)

    def _has_arrived(self, tensor: Tensor | None) -> bool:
        """Returns whether the gradient of a member has arrived on this rank."""
        leaf = None if tensor is None else leaf_of(tensor)
        reducer = None if leaf is None else leaf.reducer()
        if leaf is None or reducer is None or reducer.mesh is not self._mesh:
            return False
        return leaf.key in self.arrived


def mean_of_member(leaf: Leaf, grad: Tensor | None, mesh: Mesh, weight: float) -> Tensor:
    """Returns the mean of a member's gradient; None counts as zero. Collective, differentiable."""
    own = leaf.kind.zeros() if grad is None else grad  # another rank may have one
    return graph.mean_of(own, mesh, leaf.axes, weight)


def _on_any_rank(
    asked: Sequence[int], arrived: Sequence[int], found: Sequence[Any], mesh: Mesh
) -> list[int]:
    """Returns which of the requested gradients any rank has. Collective.

    Raises:
        NotSupported: some ranks would have a graph of a mean, and others would not; on all ranks.
    """
    if not asked:
        return []
    # Gradients of members of other meshes are not this one's to average.
    own = [[i in arrived for i in asked], [i in arrived and found[i] is not None for i in asked]]
    counts = torch.tensor(own).long()
    mesh.world.all_reduce(counts)
    used = [(i, n) for i, n, present in zip(asked, *counts.tolist(), strict=True) if present]
    if torch.is_grad_enabled() and any(n < mesh.size for _, n in used):
        raise NotSupported(
            "torch.autograd.grad(create_graph=True) of a parameter that some sample groups use and "
            "others do not: only some could form second derivatives; let all use it, as times 0"
        )
    return [i for i, _ in used]
