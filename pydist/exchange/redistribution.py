"""Redistribution of shards from one layout to another."""

from __future__ import annotations

from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.adjoints import gather_box, with_true_gradient
from pydist.exchange.exchanger import Exchanger
from pydist.exchange.formats import all_channels_last
from pydist.layout import Layout


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
        local = with_true_gradient(local, mesh, source.unused_axes)
    return gather_box(local, exchanger, mesh, weight=weight, part="redistribute")
