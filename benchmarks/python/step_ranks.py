"""What the ranks of `cosmoflow_step.py` and `unet_step.py` do when the driver asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import common
import jobs


class StepRanks(ABC):
    """One rank with the contestants that were made on it.

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
        """Inputs and targets of a step."""

    @abstractmethod
    def _model(self) -> Any:
        """The network, with the same weights at every call."""

    @abstractmethod
    def _loss(self, output: Any, target: Any) -> Any:
        """What all contestants minimise."""

    @abstractmethod
    def _make(self, entry: Any) -> Any:
        """A contestant."""

    def library(self) -> str:
        """The MPI library, or the transport's name."""
        return jobs.library(self._world)

    def check(self, entry: Any) -> dict[str, Any]:
        """Makes a contestant and runs its first step; rank 0 has the gradients of exact ones."""
        made = self._made[entry.title] = self._make(entry)
        made.prepare(*self._draw(0))
        loss, grads = made.step(check=True)
        return {"loss": loss, "grads": grads if self._world.rank == 0 and entry.exact else None}

    def step(self, title: str, seed: int) -> float:
        """Seconds of one step on fresh data."""
        made = self._made[title]
        made.prepare(*self._draw(seed))
        self._world.barrier()
        return self._meter.measure(title, made.step)

    def usage(self, title: str) -> tuple[float, float]:
        """CPU seconds and page faults of a step."""
        return self._meter.usage(title)

    def kept(self, title: str) -> int:
        """Bytes that a silent contestant was given to send."""
        return self._made[title].kept()

    def reference(self) -> dict[str, Any]:
        """Loss and gradients of plain torch in double precision."""
        import torch

        torch.set_num_threads(common.cores())
        model = self._model().double()
        x, target = self._draw(0)
        if target.is_floating_point():
            target = target.double()
        loss = self._loss(model(x.double()), target)
        loss.backward()
        return {"loss": loss.item(), "grads": [p.grad for p in model.parameters()]}
