"""Redistributes shards from one layout to another, and gathers boxes of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.adjoints import add_boxes, average_grad, gather_box
from pydist.exchange.exchanger import Exchanger
from pydist.exchange.memory_formats import all_channels_last
from pydist.layout import Layout, Split
from pydist.partition import Box


def redistributed(
    local: Tensor, source: Layout, target: Layout, *, is_averaged: bool = False
) -> Tensor:
    """Returns this rank's shard in another layout of the same shape and mesh. Differentiable.

    Its adjoint adds every gradient back along the messages, times rep(source) / rep(target). Only
    one of several replicas sends, so the ranks with replicas then form the mean.

    Args:
        local: the shard in `source`.
        source: the present layout.
        target: the new layout.
        is_averaged: whether the gradient of `local` is averaged over its replicas later.

    Raises:
        UsageError: the layouts differ in shape or mesh.
    """
    if source == target:
        return local
    if source.shape != target.shape or source.mesh is not target.mesh:
        raise UsageError(f"can't redistribute {source!r} to {target!r}: another shape or mesh")
    if source.boxes == target.boxes:
        return local
    mesh = source.mesh

    def make() -> Exchanger:
        needed = [[box] for box in target.boxes]
        channels_last = all_channels_last(local, mesh)
        return Exchanger(mesh.sample, source.boxes, needed, channels_last=channels_last)

    exchanger = mesh.session.plan(("redistribute", source, target), make)
    weight = source.replicas / target.replicas
    if not is_averaged:
        local = average_grad(local, mesh, source.unused_axes)
    return gather_box(local, exchanger, mesh, weight=weight, part="redistribute")


def scatter_parts(partial: Tensor, layout: Layout, split: Split) -> Tensor:
    """Returns this rank's channels of the sum of partial results (reduce-scatter). Differentiable.

    In backward each rank gets the true gradient of all channels, and so of its partial result.

    Args:
        partial: this rank's partial result, with all channels.
        layout: of the sum, whose dim 1 is not cut.
        split: of dim 1, along the axes over which the ranks add.
    """
    mesh, whole = layout.mesh, layout.box

    def make() -> Exchanger:
        owned = []
        for interval in split.intervals(mesh):
            lo, hi = list(whole.lo), list(whole.hi)
            lo[1], hi[1] = interval
            owned.append(Box(lo, hi))
        channels_last = all_channels_last(partial, mesh)
        needed = [[whole]] * len(owned)
        return Exchanger(mesh.group(split.axes), owned, needed, channels_last=channels_last)

    exchanger = mesh.session.plan(("scatter parts", layout, split), make)
    return add_boxes(partial, exchanger, mesh)


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
