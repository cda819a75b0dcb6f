"""Plans a norm's statistics, and gathers them from all ranks.

A row is a set of values with its own statistics: in batch norm a channel, in instance norm a
channel of a sample, and in group norm several channels of a sample, its members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pydist.backend.statistics import Moments, merged, moments
from pydist.comm import Transport
from pydist.grid import SAMPLE_AXES
from pydist.layout import Layout
from pydist.mesh import Mesh
from pydist.ops.constants import Constant


@dataclass(frozen=True)
class NormPlan:
    """Plan of a norm's statistics: which values and ranks share them.

    Attributes:
        mesh: the mesh.
        axes: the mesh axes over which statistics are computed.
        counts: values per statistic on each rank along these axes, within this sample group.
        per_sample: whether each sample has its own statistics.
        members: number of consecutive channels that share statistics.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    counts: tuple[int, ...]
    per_sample: bool = False
    members: int = 1

    @property  # not cached: in Python 3.11 all ranks that are threads would share its lock
    def group(self) -> Transport:
        """Group that contains the ranks along the axes."""
        return self.mesh.group(self.axes)

    @property
    def ranks(self) -> int:
        """Number of ranks that the axes have together."""
        return self.mesh.grid.size(self.axes)

    @cached_property
    def known_counts(self) -> Constant | None:
        """Counts as [ranks, 1]; `None` if other sample groups have their own counts."""
        if len(self.counts) < self.ranks:
            return None
        return Constant(torch.tensor(self.counts, dtype=torch.float64).view(-1, 1))


def plan_norm(
    layout: Layout,
    dims: Sequence[int],
    axes: Sequence[str],
    per_sample: bool = False,
    members: int = 1,
) -> NormPlan:
    """Returns the cached plan of a norm over some dims of a layout.

    Args:
        layout: of the input.
        dims: dims over which a row's statistics are computed.
        axes: mesh axes over which they are computed.
        per_sample: as in `NormPlan`.
        members: as in `NormPlan`.
    """
    mesh = layout.mesh
    key = ("norm", layout, tuple(dims), tuple(axes), per_sample, members)

    def make() -> NormPlan:
        others = [a for a in SAMPLE_AXES if a not in axes]
        counts = [
            members * math.prod(box.shape[d] for d in dims)
            for i, box in enumerate(layout.boxes)
            if mesh.grid.coords(i, SAMPLE_AXES).items() >= {(a, mesh.coords[a]) for a in others}
        ]
        return NormPlan(mesh, tuple(axes), tuple(counts), per_sample, members)

    return mesh.session.plan(key, make)


class Gathering:
    """Asynchronous all-gather that collects the statistics of the shards of all ranks of a plan.

    Args:
        x: dense, [N, C, ...].
        plan: the plan of the norm.
    """

    def __init__(self, x: Tensor, plan: NormPlan) -> None:
        self._plan = plan
        own = _own_moments(x.detach(), plan)
        known = plan.known_counts
        self._row = own.view(-1)
        if known is None:
            count = x.numel() // max(1, own.shape[1])
            self._row = torch.cat([own.new_full((1,), count), self._row])
        self._rows = self._row.unsqueeze(0)
        if plan.ranks > 1:
            self._rows = self._row.new_empty(plan.ranks, self._row.numel())
            with plan.mesh.session.timers.measure("statistics"):
                self._work = plan.group.all_gather_async(self._row, self._rows)

    def wait(self) -> Moments:
        """Waits for the statistics [ranks, ...], in rank order."""
        if self._plan.ranks > 1:
            with self._plan.mesh.session.timers.measure("statistics"):
                self._work.wait()
        known, rows = self._plan.known_counts, self._rows
        if known is None:
            return Moments(rows[:, :1], *rows[:, 1:].chunk(2, 1))
        return Moments(known.on(rows.device), *rows.chunk(2, 1))

    def merged(self) -> Tensor:
        """Waits for the statistics and merges them into those [3, ...] of all ranks."""
        return merged(self.wait())


def _own_moments(x: Tensor, plan: NormPlan) -> Tensor:
    """Computes the shard's means and squared deviations, [2, ...]."""
    found = moments(x, plan.per_sample)
    if plan.members == 1:
        return found
    mean, m2 = found.view(2, -1, plan.members).transpose(1, 2)
    n = mean.new_full((1, 1), x.numel() // max(1, found.shape[1])).expand_as(mean)
    return merged(Moments(n, mean, m2))[1:]
