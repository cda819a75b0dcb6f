"""Measures which parts of a mesh axis suit the speeds of the ranks, in training steps of a run.

A round trains some steps of the run itself, with its own layers and its real exchanges. A rank is
busy in the time of a step in which it waits for nothing; the busy seconds of the parts at the
widths measured so far are the curves of `pydist.balance`, which give the next round's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from pydist.balance import Curve, balance
from pydist.data import Manifest
from pydist.errors import NotSupported, UsageError
from pydist.grid import OTHER_AXES, SPATIAL_AXES
from pydist.mesh import Mesh
from pydist.partition import divide
from pydist.train.device import choose_device
from pydist.train.trial import StepListener, take_steps

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.train.config import Config
    from pydist.train.log import Event
    from pydist.train.state import State

_WAITING = ("halo", "statistics", "gradients", "redistribute", "data")
"""Parts of a step in which a rank mostly waits; see `pydist.timers`."""
_PERCENT = 100
"""Width of all parts along other axes: layers have different numbers of channels."""
_LEAST_UNITS = 8
"""Least units per even part, which limit the multiple that parts have by default."""
_LEAST_GAIN = 0.02
"""Fraction of the time that another round must promise to save."""
WARMUP = 3
"""Steps before those that are measured, in which convolutions are autotuned."""


@dataclass(frozen=True)
class Round:
    """Measurement of one division of the axis, equal on all ranks.

    Attributes:
        sizes: width of each part.
        busy: seconds of a step in which the busiest rank of each part waits for nothing.
        seconds: of a step, on the slowest rank.
    """

    sizes: tuple[int, ...]
    busy: tuple[float, ...]
    seconds: float


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
    config: Config, ranks: int, name: str | None = None, multiple: int | None = None
) -> Axis:
    """Returns the axis to balance.

    Args:
        config: of the run.
        ranks: number of ranks.
        name: of the axis; by default the only one with several parts.
        multiple: see `Axis`; by default the largest power of two that divides the extent and leaves
            8 units per part, so that strided layers cut at the same places.

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
            f"--axis {name}: the mesh has 1 part along it; possible are {', '.join(several)}"
            if name in counts
            else f"--axis {name}: possible are {', '.join(counts)}"
        )
    parts, extent = counts[name], _PERCENT
    if name in SPATIAL_AXES:
        extent = Manifest.load(config.data.path).sample_shape[1 + SPATIAL_AXES.index(name)]
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


def find_parts(
    config: Config,
    world: Transport,
    axis: Axis,
    steps: int,
    rounds: int,
    show: Callable[[Round], None],
) -> Round:
    """Measures divisions of an axis, each chosen from the ones before. Collective.

    Args:
        config: as for `pydist train`; its own shares are the first division.
        world: the transport over all ranks.
        axis: the axis.
        steps: measured steps per round.
        rounds: maximum number of rounds.
        show: called with each round, on all ranks.

    Returns:
        The round with the least time of a step.

    Raises:
        NotSupported: the run uses CUDA devices, where hosts do not know what a step waits for.
        PydistError: as for `pydist.train.run.train`.
    """
    shares = config.mesh.shares.given.get(axis.name, (1.0,) * axis.parts)
    division = divide(axis.extent, shares, multiple=axis.multiple)
    points: list[list[tuple[float, float]]] = [[] for _ in range(axis.parts)]
    done: dict[tuple[int, ...], Round] = {}
    for _ in range(rounds):
        found = measure(config, world, axis, tuple(division.sizes), steps)
        done[found.sizes] = found
        show(found)
        for curve, width, seconds in zip(points, found.sizes, found.busy, strict=True):
            curve.append((width, seconds))
        curves = [Curve(each) for each in points]
        division = balance(curves, axis.extent, multiple=axis.multiple)
        expected = max(c(size) for c, size in zip(curves, division.sizes, strict=True))
        least = min(max(each.busy) for each in done.values())
        if tuple(division.sizes) in done or expected > (1 - _LEAST_GAIN) * least:
            break
    return min(done.values(), key=lambda each: each.seconds)


def with_parts(config: Config, axis: Axis, sizes: tuple[int, ...]) -> Config:
    """Returns the configuration with these parts of the axis."""
    shares = replace(config.mesh.shares, **{axis.name: tuple(map(float, sizes))})
    return replace(config, mesh=replace(config.mesh, shares=shares))


def measure(
    config: Config, world: Transport, axis: Axis, sizes: tuple[int, ...], steps: int
) -> Round:
    """Measures steps of a run with these parts of an axis. Collective; see `find_parts`."""
    wanted = with_parts(config, axis, sizes).mesh
    mesh = Mesh(
        world,
        wanted.data,
        wanted.spatial,
        config.train.seed,
        axes=wanted.axes,
        shares=wanted.shares.given,
    )
    if choose_device(config.train.device, mesh.world).type != "cpu":
        raise NotSupported(
            "pydist balance on CUDA devices: hosts do not know what a step of the device waits "
            'for; measure with train.device = "cpu", or set mesh.shares by hand'
        )
    measured: list[tuple[float, float]] = []

    @contextmanager
    def measuring(_: State) -> Iterator[StepListener]:
        def listen(event: Event) -> None:
            waited = sum(event["parts"].get(part, 0.0) for part in _WAITING)
            measured.append((event["seconds"] - waited, event["seconds"]))

        yield listen

    take_steps(config, mesh, WARMUP + steps, measuring)
    mine = torch.tensor([median(each) for each in zip(*measured[WARMUP:], strict=True)]).double()
    everyones = world.all_gather(mine)
    busy = [0.0] * axis.parts
    for rank, seconds in enumerate(everyones[:, 0].tolist()):
        part = mesh.grid.coords(rank)[axis.name]
        busy[part] = max(busy[part], seconds)
    return Round(sizes, tuple(busy), float(everyones[:, 1].max()))
