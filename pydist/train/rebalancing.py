"""Re-balances a mesh axis between epochs: other parts, when the speeds of ranks have changed."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from pydist.balance import Curve, balance
from pydist.errors import NotSupported
from pydist.train.job import Job
from pydist.train.parts import (
    WARMUP,
    axis_of,
    busiest,
    division_of,
    mesh_with,
    waited,
    with_parts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pydist.train.config import Config

LEAST_GAIN = 0.1
"""Fraction of the busiest rank's time that other parts must promise to save: they cost a checkpoint
and new plans, and times of single epochs scatter."""
LEAST_STEPS, MOST_STEPS = 5, 50
"""Number of latest steps whose times decide."""


class Rebalancing:
    """Chooses the parts of an axis, at the end of an epoch, by how long ranks were busy with them.

    Args:
        config: of the run; `config.mesh.rebalance` names the axis.
        job: on one mesh.
        device: of the network.

    Raises:
        NotSupported: the network is on a CUDA device; see `pydist.train.balancing.measure`.
        UsageError: the mesh has one part along the axis, or too few units for its parts.
    """

    def __init__(self, config: Config, job: Job, device: torch.device) -> None:
        if device.type != "cpu":
            raise NotSupported(
                "mesh.rebalance on CUDA devices: hosts do not know what a step of the device waits "
                "for; set mesh.shares by hand"
            )
        name = config.mesh.rebalance
        self.axis = axis_of(config, job.world.size, name, given_as="mesh.rebalance =")
        self.sizes = tuple(division_of(config, self.axis).sizes)
        """The present parts."""
        self.chosen: tuple[int, ...] | None = None
        """The parts that are to follow."""
        self.busy: tuple[float, ...] = ()
        """Seconds of a step for which each present part was busy, at the last decision."""
        self._config, self._job = config, job
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._skipped = 0

    def note(self, seconds: float, parts: Mapping[str, float]) -> None:
        """Notes the time of a step of this rank, in total and by part."""
        if self._skipped < WARMUP:
            self._skipped += 1  # convolutions are autotuned
        else:
            self._steps.append(seconds - waited(parts))

    def decide(self) -> bool:
        """Chooses parts, and returns whether they are worth the change. Collective."""
        if len(self._steps) < LEAST_STEPS:
            return False  # on all ranks: they take the same steps
        self.busy = busiest(self.axis, self._job.mesh, median(self._steps))
        self._steps.clear()
        axis, most = self.axis, max(self.busy)
        curves = [Curve([each]) for each in zip(self.sizes, self.busy, strict=True)]
        division = balance(curves, axis.extent, multiple=axis.multiple)
        expected = max(c(size) for c, size in zip(curves, division.sizes, strict=True))
        if expected > (1 - LEAST_GAIN) * most:
            return False
        self.chosen = tuple(division.sizes)
        return True

    def moved(self) -> tuple[Config, Job]:
        """Returns the configuration and the job with the chosen parts. Collective."""
        assert self.chosen is not None
        config = with_parts(self._config, self.axis, self.chosen)
        return config, replace(self._job, mesh=mesh_with(config, self._job.world))
