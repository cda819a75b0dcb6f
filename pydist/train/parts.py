"""The parts of a mesh axis, and how long the ranks are busy with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pydist.data import Manifest
from pydist.errors import UsageError
from pydist.grid import OTHER_AXES, SPATIAL_AXES
from pydist.mesh import Mesh
from pydist.partition import Partition, divide

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.train.config import Config

_WAITING = ("halo", "statistics", "gradients", "redistribute", "data")
"""Parts of a step in which a rank mostly waits; see `pydist.timers`."""
_PERCENT = 100
"""Width of all parts along other axes: layers have different numbers of channels."""
_LEAST_UNITS = 8
"""Least units per even part, which limit the multiple that parts have by default."""

WARMUP = 3
"""Steps before those that are measured, in which convolutions are autotuned."""


@dataclass(frozen=True)
class Axis:
    """The axis whose parts are chosen.

    Attributes:
        name: of the mesh axis.
        parts: number of parts.
        extent: width of all parts: elements of a spatial dim, samples of a batch, or percent along
            other axes.
        multiple: a part's width is a multiple of this.
    """

    name: str
    parts: int
    extent: int
    multiple: int


def axis_of(
    config: Config,
    ranks: int,
    name: str | None = None,
    multiple: int | None = None,
    given_as: str = "--axis",
) -> Axis:
    """Returns the axis to balance.

    Args:
        config: of the run.
        ranks: number of ranks.
        name: of the axis; by default the only one with several parts.
        multiple: see `Axis`; by default the largest power of two that divides the extent and leaves
            8 units per part, so that strided layers cut at the same places.

        given_as: the option or setting that names the axis, for errors.

    Raises:
        UsageError: no such axis, or not one but several to choose from, or a multiple that leaves
            no unit for a part.
    """
    counts = config.mesh.parts(ranks)
    several = [axis for axis, parts in counts.items() if parts > 1]
    if name is None and len(several) != 1:
        raise UsageError(
            f"choose an axis with --axis: {' or '.join(several)}"
            if several
            else "no axis has several parts: set mesh.data, mesh.spatial or mesh."
            + " or mesh.".join(OTHER_AXES)
        )
    name = name or several[0]
    if counts.get(name, 1) == 1:
        raise UsageError(
            f"{given_as} {name}: the mesh has 1 part along it; possible are {', '.join(several)}"
            if name in counts
            else f"{given_as} {name}: possible are {', '.join(counts)}"
        )
    parts, extent = counts[name], _PERCENT
    if name in SPATIAL_AXES:
        stored = Manifest.load(config.data.path).sample_shape
        extent = config.data.augment.cropped(stored)[1 + SPATIAL_AXES.index(name)]
    elif name == "data":
        extent = config.train.batch
        if extent < parts:
            raise UsageError(
                f"train.batch = {extent}: a sample for each of {parts} parts is needed"
            )
    if multiple is None:
        multiple = 1
        while name in SPATIAL_AXES and extent % (2 * multiple) == 0:
            if extent // (2 * multiple) < _LEAST_UNITS * parts:
                break
            multiple *= 2
    if not 1 <= multiple <= extent // parts:
        raise UsageError(
            f"--multiple {multiple}: 1 to {extent // parts} are possible, for {parts} parts of "
            f"{extent}"
        )
    return Axis(name, parts, extent, multiple)


def division_of(config: Config, axis: Axis) -> Partition:
    """Returns the division of an axis by the shares of a configuration, or the even one."""
    shares = config.mesh.shares.given.get(axis.name, (1.0,) * axis.parts)
    return divide(axis.extent, shares, multiple=axis.multiple)


def with_parts(config: Config, axis: Axis, sizes: tuple[int, ...]) -> Config:
    """Returns the configuration with these parts of the axis."""
    shares = replace(config.mesh.shares, **{axis.name: tuple(map(float, sizes))})
    return replace(config, mesh=replace(config.mesh, shares=shares))


def mesh_with(config: Config, world: Transport) -> Mesh:
    """Makes the mesh of a configuration over all ranks. Collective."""
    wanted, shares = config.mesh, config.mesh.shares.given
    spatial = [wanted.parts()[axis] for axis in SPATIAL_AXES]
    return Mesh(world, wanted.data, spatial, config.train.seed, axes=wanted.axes, shares=shares)


def waited(parts: Mapping[str, float]) -> float:
    """Returns the seconds of a step in which a rank mostly waits, from its seconds by part."""
    return sum(parts.get(part, 0.0) for part in _WAITING)


def busiest(axis: Axis, mesh: Mesh, busy: float) -> tuple[float, ...]:
    """Returns the busy seconds of the busiest rank of each part. Collective.

    Args:
        axis: the axis.
        mesh: over all ranks.
        busy: seconds of a step in which this rank waits for nothing.
    """
    most = [0.0] * axis.parts
    everyones = mesh.world.all_gather(torch.tensor(busy).double())
    for rank, seconds in enumerate(everyones.flatten().tolist()):
        part = mesh.grid.coords(rank)[axis.name]
        most[part] = max(most[part], seconds)
    return tuple(most)
