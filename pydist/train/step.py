"""Makes one training step: forward, backward with its exchanges, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.entry_hook import entry_hook_of
from pydist.optim import average_parameters
from pydist.train.device import autocast
from pydist.train.noise import GradientSquares, SquaredNorms

if TYPE_CHECKING:
    from pydist.data.loader import Batch
    from pydist.train.config import TrainConfig
    from pydist.train.state import RunState
    from pydist.train.tasks import Task
    from pydist.train.tasks.base import Criterion


class TrainStep:
    """Training step that never synchronizes with the device, so that it can be captured.

    Args:
        state: network, optimizer and scaler; its loader determines the device.
        task: computes the loss.
        config: precision and clipping.
    """

    def __init__(self, state: RunState, task: Task, config: TrainConfig) -> None:
        self.state, self.task, self.config = state, task, config
        self.mesh = state.mesh
        self.device = state.loader.device

    def __call__(self, batch: Batch, scale: float | Tensor) -> Tensor:
        """Performs the step.

        Args:
            batch: the samples.
            scale: factor of the loss, 0 where the samples are padding; see `Batch.loss_scale`.

        Returns:
            The group's loss, a scalar on the device.
        """
        loss = self._backward(batch, scale, self.task.criterion([batch]))
        self._update()
        return loss

    def accumulated(self, passes: Iterable[Batch]) -> Tensor:
        """Performs the step in several passes, whose gradients are reduced once, with the last.

        Args:
            passes: the batches of the step. They are taken one by one; all first, if the loss of
                one depends on the targets of all.

        Returns:
            The sum of the losses of the group's samples, a scalar on the device.
        """
        return self._over(passes, None)

    def measured(self, passes: Iterable[Batch]) -> tuple[Tensor, SquaredNorms]:
        """Performs the step as `accumulated`, and measures the norms of its parts' gradients.

        The gradients of all passes are reduced after the last one.

        Returns:
            The sum of losses, and `GradientSquares.figures`.
        """
        squares = GradientSquares(self.state.model, self.mesh)
        total = self._over(passes, squares)
        return total, squares.figures

    def _over(self, passes: Iterable[Batch], squares: GradientSquares | None) -> Tensor:
        of_all: Criterion | None = None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.task.weighs_targets:
            passes = list(passes)
            of_all = self.task.criterion(passes)
        for batch in passes:
            criterion = of_all or self.task.criterion([batch])
            with nullcontext() if squares is None else entry_hook_of(self.state.model).no_sync():
                loss = self._backward(batch, batch.loss_scale, criterion)
            if squares is not None:
                squares.add_pass(batch)
            if batch.count:  # the mean over no samples is NaN
                total += loss.double() * batch.count
        if squares is not None:
            entry_hook_of(self.state.model).reduce()
            squares.finish(self.state.scaler.get_scale())
        self._update()
        return total

    def _backward(self, batch: Batch, scale: float | Tensor, criterion: Criterion) -> Tensor:
        mixed = autocast(self.device, self.config.amp)
        state = self.state
        return state.network.backward(batch, criterion, scale, state.scaler, mixed)

    def _update(self) -> None:
        """Steps the optimizer with the accumulated gradient, and clears it."""
        state, config = self.state, self.config
        state.network.clip(state.scaler, state.optimizer, config.clip_norm)
        with self.mesh.session.timers.measure("optimizer"):
            state.scaler.step(state.optimizer)
        state.scaler.update()
        if state.network.gradients.keeps:
            average_parameters(state.model, state.optimizer)
        state.optimizer.zero_grad()
