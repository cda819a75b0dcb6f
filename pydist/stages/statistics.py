"""Running statistics of batch norms that change once for a batch, not for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pydist.backend.statistics import Moments, merged, unbiased
from pydist.errors import NotSupported
from pydist.stages.calls import Call
from pydist.stages.ranks import Stages


@dataclass
class _Norm:
    """Statistics that a batch norm has: running ones, and of the batch so far.

    Attributes:
        mean: running mean, [C].
        var: running variance, [C].
        momentum: the weight of the batch.
        found: moments [3, C] of the micro-batches on this rank's mesh.
    """

    mean: Tensor
    var: Tensor
    momentum: float
    found: Tensor


class BatchStatistics:
    """Collects the statistics of a batch over its micro-batches.

    They are the mean and the unbiased variance of what all micro-batches give a norm. Source:
    torchgpipe's deferred batch norm, which leaves the variance biased.

    Args:
        stages: the stages.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._norms: dict[int, _Norm] = {}  # by id of the running mean, in order of the calls

    def compute(
        self, call: Call, run: Callable[[Call], Any], *, runs: bool, share: float
    ) -> object:
        """Computes a norm in training without changing its running statistics.

        Args:
            call: the call; all ranks know it.
            run: computes a call.
            runs: whether this rank's stage computes it; else the result is `None`.
            share: this group's samples, divided by the samples of all groups' micro-batches.

        Raises:
            NotSupported: the norm is none of batch norm with both statistics.
        """
        given = call.named
        mean, var, momentum = given["running_mean"], given["running_var"], given.get("momentum")
        if "training" not in given or mean is None or var is None:
            raise NotSupported(
                f'{call} with running_statistics="batch": batch norm with both running statistics '
                "is possible"
            )
        norm = self._norms.get(id(mean))
        if norm is None:
            none = torch.zeros(3, mean.numel(), dtype=torch.float64)
            norm = self._norms[id(mean)] = _Norm(mean, var, 0.1, none)
        norm.momentum = 0.1 if momentum is None else momentum
        if not runs:
            return None
        own = torch.zeros_like(mean), torch.ones_like(var)
        changed = {**given, "running_mean": own[0], "running_var": own[1], "momentum": 1.0}
        result = run(call._replace(args=(), kwargs=changed))
        x = given["input"].meta
        count = round(x.numel() / x.shape[1] / share)
        n = torch.full((1,), float(count), dtype=torch.float64)
        part = torch.stack([n.expand(mean.numel()), own[0].cpu().double(), own[1].cpu().double()])
        part[2] *= count - 1
        norm.found = _union(torch.stack([norm.found, part]))
        return result

    @torch.no_grad()
    def update(self) -> None:
        """Adds the batch's statistics to the running ones, on all ranks. Collective."""
        if not self._norms:
            return
        stages = self._stages
        mine = torch.cat([norm.found for norm in self._norms.values()], dim=1)
        rows = stages.world.all_gather(mine)
        rows = torch.stack([rows[each.rank(0, 0)] for each in stages.meshes])
        for norm, (a, b) in zip(self._norms.values(), self._columns(), strict=True):
            total = Moments(*_union(rows[:, :, a:b].contiguous()))
            norm.mean.lerp_(total.mean.to(norm.mean), norm.momentum)
            norm.var.lerp_(unbiased(total).to(norm.var), norm.momentum)
        self._norms.clear()

    def forget(self) -> None:
        """Forgets the micro-batches of a batch that failed."""
        self._norms.clear()

    def _columns(self) -> Iterator[tuple[int, int]]:
        end = 0
        for norm in self._norms.values():
            start, end = end, end + norm.mean.numel()
            yield start, end


def _union(parts: Tensor) -> Tensor:
    """Returns the moments [3, C] of the union of parts [parts, 3, C]."""
    n, mean, m2 = (parts[:, i].contiguous() for i in range(3))
    return merged(Moments(n, mean, m2))
