"""Measures which parts of a mesh axis suit the speeds of the ranks, in training steps of a run.

A round trains some steps of the run itself, with its own layers and its real exchanges. A rank is
busy in the time of a step in which it waits for nothing; the busy seconds of the parts at the
widths measured so far are the curves of `pydist.balance`, which give the next round's parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from pydist.balance import Curve, balance
from pydist.errors import NotSupported
from pydist.train.device import choose_device
from pydist.train.parts import (
    WARMUP,
    Axis,
    busiest,
    division_of,
    mesh_with,
    waited,
    with_parts,
)
from pydist.train.trial import recorded_steps

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.train.config import Config

_LEAST_GAIN = 0.02
"""Fraction of the time that another round must promise to save."""


@dataclass(frozen=True)
class Round:
    """Times that one division of the axis takes, equal on all ranks.

    Attributes:
        sizes: width of each part.
        busy: seconds of a step in which the busiest rank of each part waits for nothing.
        seconds: of a step, on the slowest rank.
    """

    sizes: tuple[int, ...]
    busy: tuple[float, ...]
    seconds: float


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
    division = division_of(config, axis)
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


def measure(
    config: Config, world: Transport, axis: Axis, sizes: tuple[int, ...], steps: int
) -> Round:
    """Measures steps of a run with these parts of an axis. Collective; see `find_parts`."""
    mesh = mesh_with(with_parts(config, axis, sizes), world)
    if choose_device(config.train.device, mesh.world).type != "cpu":
        raise NotSupported(
            "pydist balance on CUDA devices: hosts do not know what a step of the device waits "
            'for; measure with train.device = "cpu", or set mesh.shares by hand'
        )
    events = recorded_steps(config, mesh, steps, WARMUP)
    busy = median(event["seconds"] - waited(event["parts"]) for event in events)
    seconds = median(event["seconds"] for event in events)
    slowest = world.all_gather(torch.tensor(seconds).double()).max()
    return Round(sizes, busiest(axis, mesh, busy), float(slowest))
