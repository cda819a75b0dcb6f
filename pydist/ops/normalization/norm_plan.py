"""Which values of a norm share their statistics, and how these come together from all ranks.

Rows are what has statistics of its own. The rows of batch norm are channels. Those of instance norm
are the channels of each sample; in group norm several of them, its members, share their statistics.
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
    """Which values share statistics.

    Attributes:
        mesh: the mesh.
        axes: the mesh axes over which statistics are formed.
        counts: values behind each statistic on the ranks along these axes, of this sample group.
        per_sample: whether each sample has statistics of its own.
        members: consecutive channels that share theirs.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    counts: tuple[int, ...]
    per_sample: bool = False
    members: int = 1

    @property  # not a cached one, whose lock all ranks that are threads share in Python 3.11
    def group(self) -> Transport:
        """The ranks along the axes."""
        return self.mesh.group(self.axes)

    @property
    def ranks(self) -> int:
        """How many these are."""
        return self.mesh.grid.size(self.axes)

    @cached_property
    def known_counts(self) -> Constant | None:
        """The counts as [ranks, 1]; `None` where other sample groups have counts of their own."""
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
    """The plan of a norm over some dims of a layout, made once.

    Args:
        layout: of the input.
        dims: over which a row's statistics are formed.
        axes: of the mesh, over which they are formed.
        per_sample: as of the plan.
        members: as of the plan.
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
    """The statistics of a shard, on their way to all ranks of a plan.

    Args:
        x: dense, [N, C, ...].
        plan: says which rows share statistics, and who takes part.
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
        """The statistics [ranks, ...], in rank order."""
        if self._plan.ranks > 1:
            with self._plan.mesh.session.timers.measure("statistics"):
                self._work.wait()
        known, rows = self._plan.known_counts, self._rows
        if known is None:
            return Moments(rows[:, :1], *rows[:, 1:].chunk(2, 1))
        return Moments(known.on(rows.device), *rows.chunk(2, 1))

    def merged(self) -> Tensor:
        """The statistics [3, ...] of the union."""
        return merged(self.wait())


def _own_moments(x: Tensor, plan: NormPlan) -> Tensor:
    """Mean and squared deviations, [2, ...]."""
    found = moments(x, plan.per_sample)
    if plan.members == 1:
        return found
    mean, m2 = found.view(2, -1, plan.members).transpose(1, 2)
    n = mean.new_full((1, 1), x.numel() // max(1, found.shape[1])).expand_as(mean)
    return merged(Moments(n, mean, m2))[1:]
