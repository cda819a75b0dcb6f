"""Gathers a box of a tensor on each rank: the general path of stencil operations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pydist.exchange.adjoints import average_grad, gather_box
from pydist.exchange.exchanger import Exchanger
from pydist.layout import Layout
from pydist.partition import Box


class BoxGatherer:
    """Gatherer of the box of inputs that each rank needs, in either memory format.

    Args:
        layout: of the inputs.
        needed: the box of each rank; positions outside the domain are filled with zeros.
    """

    def __init__(self, layout: Layout, needed: Sequence[Box]) -> None:
        self._layout, self._needed = layout, needed
        self._exchangers: dict[bool, Exchanger] = {}

    def __call__(self, local: Tensor, channels_last: bool = False) -> Tensor:
        """Returns this rank's box, gathered from its shard and the shards of other ranks.

        Args:
            local: the shard.
            channels_last: the memory format of the result, and of the shard's gradient.
        """
        mesh, layout = self._layout.mesh, self._layout
        if channels_last not in self._exchangers:
            needed = [[box] for box in self._needed]
            self._exchangers[channels_last] = Exchanger(
                mesh.sample, layout.boxes, needed, mesh.session.timers, channels_last
            )
        held = average_grad(local, mesh, layout.unused_axes)
        return gather_box(held, self._exchangers[channels_last], mesh)
