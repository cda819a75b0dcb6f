"""Re-balances a mesh axis between epochs: other parts, when the speeds of ranks have changed."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pydist.balance import Curve, balance
from pydist.comm.consensus import together
from pydist.errors import NotSupported, UsageError
from pydist.train import checkpoint, config_io
from pydist.train.folder import CHECKPOINTS, CONFIG_FILE
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

    If the busiest rank is busy for longer with new parts, the former ones return, for good.

    Args:
        config: of the run; `config.mesh.rebalance` names the axis.
        job: on one mesh.
        device: of the network.
        before: chose the present parts.

    Raises:
        NotSupported: the network is on a CUDA device; see `pydist.train.balancing.measure`.
        UsageError: the mesh has one part along the axis, or too few units for its parts.
    """

    def __init__(
        self, config: Config, job: Job, device: torch.device, before: Rebalancing | None = None
    ) -> None:
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
        self._config, self._job, self._before = config, job, before
        self._is_settled: bool = before is not None and before._is_settled
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
        if self._is_settled or len(self._steps) < LEAST_STEPS:
            return False  # on all ranks: they take the same steps
        self.busy = busiest(self.axis, self._job.mesh, median(self._steps))
        self._steps.clear()
        axis, most = self.axis, max(self.busy)
        before, self._before = self._before, None
        if before is not None and most > max(before.busy):
            # The parts did not help, as where a rank is slow whatever its part is.
            self.chosen, self._is_settled = before.sizes, True
            return True
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


def resumed(config: Config, job: Job) -> tuple[Config, Job]:
    """Returns the configuration and the job with the parts that an earlier run has chosen last.

    Collective. They are in the configuration that the run wrote to its folder.
    """
    axis, folder, shares = config.mesh.rebalance, config.output.folder, list[float]()
    with together(job.world, "reading the parts of the last run"):
        if job.writes and config.checkpoint.resume != "never":
            shares = _last_shares(config, folder)
    shares = job.world.broadcast_json(shares, job.writer)
    if axis is None or len(shares) != config.mesh.parts(job.world.size).get(axis, 1):
        return config, job
    changed = replace(config.mesh.shares, **{axis: tuple(shares)})
    if changed == config.mesh.shares:
        return config, job
    config = replace(config, mesh=replace(config.mesh, shares=changed))
    return config, replace(job, mesh=mesh_with(config, job.world))


def _last_shares(config: Config, folder: Path) -> list[float]:
    """Returns the shares of the axis in a run's folder; nothing if there are none."""
    path = folder / CONFIG_FILE
    if not path.exists() or not checkpoint.complete(folder / CHECKPOINTS):
        return []
    try:
        last = config_io.load(path).mesh
    except UsageError:  # of another version
        return []
    axis = config.mesh.rebalance
    found = last.shares.given.get(axis) if axis == last.rebalance and axis else None
    return list(found or [])
