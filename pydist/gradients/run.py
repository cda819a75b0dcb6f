"""A run of torch's engine, as the reducer sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist.exchange.adjoints import mean_ranks
from pydist.group_sizes import GroupSizes, weights_of

if TYPE_CHECKING:
    from pydist.gradients.leaf import Leaf
    from pydist.mesh import Mesh


class Run:
    """A run of torch's engine over a graph with members or sharded tensors.

    Args:
        roots: the nodes of the graph where it starts.
        sizes: of the batch whose outputs have no graph, if that was the last one.
        accumulates: whether gradients go to `.grad`; else `autograd.grad` returns them.

    Attributes:
        reaches_none: whether it is known to reach no member.
        complete: whether the gradients were reduced.
        added: the members whose gradients it has added to.
    """

    def __init__(
        self, roots: Sequence[Any], sizes: GroupSizes | None, *, accumulates: bool
    ) -> None:
        self.accumulates, self._roots, self._sizes = accumulates, roots, sizes
        self.added: list[Leaf] = []
        self.reaches_none = self.complete = False
        self._returned: dict[Leaf, tuple[Tensor, float]] = {}

    def weight(self, mesh: Mesh) -> float:
        """What the gradients of this rank's sample group weigh."""
        return weights_of(mesh).weight(self._roots, self._sizes) if mesh.data_size > 1 else 1.0

    @property
    def returns(self) -> bool:
        """Whether `autograd.grad` returns gradients that are still this rank's own."""
        return bool(self._returned)

    def give_back(self, leaf: Leaf, own: Tensor, weight: float) -> Tensor:
        """A gradient for `autograd.grad` to return; the mean takes its place when the run ends.

        Not before: the order in which gradients arrive is another on a rank that has certain hooks.

        Args:
            leaf: whose gradient.
            own: this rank's.
            weight: what it weighs.
        """
        leaf.waits = leaf.has_hooks
        self._returned[leaf] = own.clone(), weight
        return self._returned[leaf][0]

    @torch.no_grad()
    def reduce_returned(
        self, mesh: Mesh, members: Iterable[Leaf], axes: Callable[[Leaf], tuple[str, ...]]
    ) -> None:
        """Makes means of what is returned, and shows them to users' hooks. Collective.

        Args:
            mesh: the mesh.
            members: all there are, in the same order on all ranks.
            axes: tells the mesh axes over which a member is held.
        """
        for leaf in members:
            if leaf in self._returned:
                result, weight = self._returned[leaf]
                mean = mean_ranks(result, mesh, axes(leaf), "gradients", weight)
                result.copy_(leaf.seen_by_hooks(mean))
