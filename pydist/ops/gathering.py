"""Bringing every rank a box of a tensor: the general path of operations that look around."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pydist.exchange.adjoints import gather_box, with_true_gradient
from pydist.exchange.exchanger import Exchanger
from pydist.layout import Layout
from pydist.partition import Box


class BoxGatherer:
    """Brings every rank the box of inputs that it needs, in either memory format.

    Args:
        layout: of the inputs.
        needed: the box of each rank; beyond the domain there are zeros.
    """

    def __init__(self, layout: Layout, needed: Sequence[Box]) -> None:
        self._layout, self._needed = layout, needed
        self._exchangers: dict[bool, Exchanger] = {}

    def __call__(self, local: Tensor, channels_last: bool = False) -> Tensor:
        """This rank's box, from its shard and those of others.

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
        held = with_true_gradient(local, mesh, layout.unused_axes)
        return gather_box(held, self._exchangers[channels_last], mesh)
