"""One training step: forward, backward with its exchanges, and the optimizer's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pydist.train.device import autocast

if TYPE_CHECKING:
    from pydist.data.loader import Batch
    from pydist.train.config import TrainConfig
    from pydist.train.state import State
    from pydist.train.tasks import Task


class TrainStep:
    """Training step that never synchronizes with the device, so that it can be captured.

    Args:
        state: network, optimizer and scaler; its loader determines the device.
        task: computes the loss.
        config: precision and clipping.
    """

    def __init__(self, state: State, task: Task, config: TrainConfig) -> None:
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
        state, config = self.state, self.config
        loss = state.network.backward(
            batch, self.task, scale, state.scaler, autocast(self.device, config.amp)
        )
        state.network.clip(state.scaler, state.optimizer, config.clip_norm)
        with self.mesh.session.timers.measure("optimizer"):
            state.scaler.step(state.optimizer)
        state.scaler.update()
        state.network.gradients.after_step(state.optimizer)
        state.optimizer.zero_grad()
        return loss
