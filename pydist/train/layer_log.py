"""Logs the norms and trust ratios of a run's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydist.optim import trust_ratios

if TYPE_CHECKING:
    from torch import nn

    from pydist.optim.layerwise import LayerwiseOptimizer
    from pydist.train.job import Job


class LayerLog:
    """Collects what layer-wise steps have used, once in a number of steps.

    Args:
        optimizer: LARS or LAMB, before it is partitioned.
        model: the network.
        job: the ranks; in stages each has the norms of its own layers.
        every: steps between entries.
    """

    def __init__(
        self, optimizer: LayerwiseOptimizer, model: nn.Module, job: Job, every: int
    ) -> None:
        self._optimizer, self._model, self._job, self._every = optimizer, model, job, every

    def begin(self, step: int) -> None:
        """Prepares the next step, after `step` steps."""
        self._optimizer.recorded = {} if (step + 1) % self._every == 0 else None

    def entry(self) -> dict[str, dict[str, Any]] | None:
        """Returns norms and ratios by parameter; `None` if none are due. Collective in stages.

        Nothing is known of a step that was skipped after an overflow.
        """
        if self._optimizer.recorded is None:
            return None
        found = trust_ratios(self._optimizer, self._model.named_parameters())
        rows = {name: each._asdict() for name, each in found.items()}
        if self._job.stages is None:
            return rows
        everyones = self._job.world.all_gather_json(rows)
        every = {name: row for each in everyones for name, row in each.items()}
        return {n: every[n] for n, _ in self._model.named_parameters() if n in every}
