"""The ranks of `cosmoflow_step.py` and `unet_step.py`, which run the driver's tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import common
import jobs


class StepRanks(ABC):
    """Rank that makes contestants and measures their steps.

    Args:
        world: the transport over the job's ranks.
        is_thread: whether the ranks are threads of one process.
    """

    def __init__(self, world: Any, is_thread: bool = False) -> None:
        self._world = world
        self._meter = jobs.Meter(is_thread)
        self._made: dict[str, Any] = {}

    @abstractmethod
    def _draw(self, seed: int) -> tuple[Any, Any]:
        """Draws inputs and targets of a step."""

    @abstractmethod
    def _model(self) -> Any:
        """Creates the network, with the same weights at every call."""

    @abstractmethod
    def _loss(self, output: Any, target: Any) -> Any:
        """Computes the loss of all contestants."""

    @abstractmethod
    def _make(self, entry: Any) -> Any:
        """Creates a contestant."""

    def library(self) -> str:
        """Returns the MPI library, or the transport's name."""
        return jobs.library(self._world)

    def check(self, entry: Any) -> dict[str, Any]:
        """Makes a contestant and runs its first step; rank 0 returns gradients of exact ones."""
        made = self._made[entry.title] = self._make(entry)
        made.prepare(*self._draw(0))
        loss, grads = made.step(check=True)
        return {"loss": loss, "grads": grads if self._world.rank == 0 and entry.exact else None}

    def step(self, title: str, seed: int) -> float:
        """Returns the seconds of one step on fresh data."""
        made = self._made[title]
        made.prepare(*self._draw(seed))
        self._world.barrier()
        return self._meter.measure(title, made.step)

    def usage(self, title: str) -> tuple[float, float]:
        """Returns CPU seconds and page faults of a step."""
        return self._meter.usage(title)

    def kept(self, title: str) -> int:
        """Returns the number of bytes that a silent contestant suppressed."""
        return self._made[title].kept()

    def reference(self) -> dict[str, Any]:
        """Computes loss and gradients of plain torch in double precision."""
        import torch

        torch.set_num_threads(common.cores())
        model = self._model().double()
        x, target = self._draw(0)
        if target.is_floating_point():
            target = target.double()
        loss = self._loss(model(x.double()), target)
        loss.backward()
        return {
            "loss": loss.item(),
            "grads": [p.grad for p in model.parameters() if p.grad is not None],
        }
