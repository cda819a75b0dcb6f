"""Measurement of the gradient noise scale in training steps, and the batch that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pydist.errors import UsageError
from pydist.exchange.own_slice import own_slice, slicing_of
from pydist.gradients.bucket import pending_gradient
from pydist.gradients.partitioned import PartitionedGradient
from pydist.optim.noise_scale import NoiseScale

if TYPE_CHECKING:
    from pydist.data.loader import Batch, Loader
    from pydist.mesh import Mesh
    from pydist.train.config.batch_schedules import BatchScheduleConfig


SquaredNorms = tuple[float, float, int]


class GradientSquares:
    """Squared norms that the gradients of a step's parts, and of the step, have on any mesh.

    The parts are the batches of the sample groups or, with one group, the passes. A rank's
    gradient before the reduction is a partial one of the same samples, so it is averaged over the
    sample group first. Methods are collective.

    Args:
        model: the parallelized network.
        mesh: its mesh.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                own = own_slice(parameter)
                self._by_axes.setdefault(slicing_of(own).axes, []).append(own)
        self._before: list[Tensor] = []
        self._sums = torch.zeros(3, dtype=torch.float64)  # of parts, their number, of the step
        self.figures: SquaredNorms = (0.0, 0.0, 0)
        """The mean of the parts' squared norms, the squared norm of the step, and the number of
        parts, for `NoiseScale.add`; equal on all ranks."""
        self._own = 0  # samples of this rank's group

    @torch.no_grad()
    def add_pass(self, batch: Batch) -> None:
        """Adds a pass, after its backward pass and before the reduction of gradients."""
        self._own += batch.count
        if self._mesh.data_size > 1:
            if batch.is_last:
                self._add_part(self._of_group(), self._own, batch.step_size)
            return
        now = self._of_group()
        before = self._before or [torch.zeros_like(row) for row in now]
        parts = [a - b for a, b in zip(now, before, strict=True)]
        self._add_part(parts, batch.count, batch.step_size)
        self._before = now

    @torch.no_grad()
    def finish(self, scale: float) -> None:
        """Computes the figures, after the reduction of gradients.

        Args:
            scale: factor of the loss.
        """
        for axes, parameters in self._by_axes.items():
            copies = self._mesh.grid.size(axes)
            for parameter in parameters:
                grad = parameter.grad
                if isinstance(grad, PartitionedGradient):
                    self._sums[2] += _square(grad.piece)
                elif grad is not None:
                    self._sums[2] += _square(grad) / copies
        world = self._mesh.world
        world.all_reduce(self._sums)
        world.broadcast(self._sums, 0)  # ranks decide by these numbers: not one bit may differ
        parts, count, whole = self._sums.tolist()
        self.figures = parts / scale**2, whole / scale**2, round(count)

    def _of_group(self) -> list[Tensor]:
        """Returns the group's accumulated gradient, a row for each kind of parameters."""
        rows = []
        for axes, parameters in self._by_axes.items():
            within = tuple(axis for axis in axes if axis != "data")
            row = torch.cat([_pending(p) for p in parameters])
            if self._mesh.grid.size(within) > 1:
                self._mesh.group(within).all_reduce(row)
                row /= self._mesh.grid.size(within)
            rows.append(row)
        return rows

    def _add_part(self, rows: list[Tensor], own: int, samples: int) -> None:
        """Adds a part of `own` samples of all `samples`, of which this rank may have a share."""
        if not own:
            return
        groups, ranks = self._mesh.data_size, self._mesh.sample_size
        # The accumulated gradient is (groups * own / samples) times the mean over the part.
        weight = samples / (groups**2 * own)
        for axes, row in zip(self._by_axes, rows, strict=True):
            copies = self._mesh.grid.size(axes) / groups
            self._sums[0] += weight * _square(row) / copies
        self._sums[1] += 1 / ranks


def _pending(parameter: Tensor) -> Tensor:
    """Returns a rank's unreduced gradient as a row, in float32 at least."""
    grad = pending_gradient(parameter)
    row = torch.zeros_like(parameter) if grad is None else grad.detach()
    return row.flatten().to(torch.promote_types(row.dtype, torch.float32))


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square().cpu()


class AdaptiveBatch:
    """Doubles the global batch while the measured noise scale is larger.

    Args:
        config: the schedule, with `noise_scale`.
        loader: the training batches.

    Raises:
        UsageError: a step has only one part, so that nothing can be measured.
    """

    def __init__(self, config: BatchScheduleConfig, loader: Loader) -> None:
        sampler = loader.sampler
        first = sampler.sizes.first
        if sampler.data_size == 1 and sampler.rule.passes(first, first) == 1:
            raise UsageError(
                "train.batch_schedule.noise_scale compares parts of a step, and a step on one "
                "sample group has one part: set train.accumulate to 2 or more, or use several "
                "groups"
            )
        assert config.largest is not None
        self._every, self._largest, self._loader = config.measure_every, config.largest, loader
        self._interval = config.samples(config.decide_every, sampler.num_samples)
        self.scale = NoiseScale()
        self._decided = 0  # measurements before the last decision

    def is_due(self, step: int) -> bool:
        """Returns whether to measure the next step, after `step` steps."""
        return step % self._every == 0

    def decide(self, seen: int) -> int | None:
        """Changes the batch from the next step on, if it is time to.

        Args:
            seen: position of the step that has ended.

        Returns:
            The new batch; `None` if it stays.
        """
        position, sizes = self._loader.sampler.position, self._loader.sampler.sizes
        if position // self._interval == seen // self._interval:
            return None
        now, news = sizes.at(position), self.scale.measurements > self._decided
        self._decided = self.scale.measurements
        grown = min(2 * now, self._largest)
        if not news or grown == now or not self.scale.value > now:
            return None
        self._loader.change_batch(grown)
        return grown

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; the sampler has the changes."""
        return {**self.scale.state_dict(), "decided": self._decided}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`."""
        self.scale.load_state_dict(state)
        self._decided = int(state["decided"])
