"""Runs complete training steps as CUDA graphs: one per batch size, captured once and replayed.

For small shards, launching the thousands of kernels of a step from Python takes longer than running
them. A graph launches all of them in one call, including exchanges and the optimizer.

The graph reads values that vary between steps from memory: inputs, targets, the scale of the loss,
learning rates and the keys of random numbers. The parts that stay in Python (schedule, counters,
checkpoints) do not depend on it, so that a step is the same with and without a graph.

Capture and replay follow https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from pydist.comm.consensus import any_rank
from pydist.errors import PydistError, RankFailed, RankLost, UsageError, one_line
from pydist.train.captured import CapturedStep
from pydist.train.device import waiting_transport
from pydist.train.step import TrainStep
from pydist.watchdog import phase

if TYPE_CHECKING:
    from pydist.data.loader import Batch

WARMUP = 5
"""Steps of a size before its capture: they make plans, buffers and optimizer state, autotune
kernels, and run the consistency checks that later steps skip."""

RECOVERS = "2.13"
"""The first version of torch whose allocator reclaims memory after a failed capture; with earlier
ones, later steps run out of memory (https://github.com/pytorch/pytorch/pull/180395)."""


class GraphedStep:
    """Training step that uses a CUDA graph where possible.

    All ranks decide identically: by the size of the global batch, and by agreement where their
    states may differ. On one rank, steps continue without a graph after a failed capture. With more
    ranks, the ranks may be at different places in the step, with unmatched exchanges: then the job
    ends.

    Args:
        step: the step.
        wanted: "auto", "always" (an error if a graph is impossible) or "never".
        notify: called once with the reason why there is no graph.

    Raises:
        UsageError: "always", and a graph is impossible.
    """

    def __init__(self, step: TrainStep, wanted: str, notify: Callable[[str], None]) -> None:
        self._step, self._wanted, self._notify = step, wanted, notify
        self._captured: CapturedStep | None = None
        self._size, self._alike = 0, 0
        self._given_up = wanted == "never"
        if not self._given_up:
            self._give_up_if(obstacle(step) or risk(wanted, step.mesh.size))

    def close(self) -> None:
        """Destroys the graph: NCCL closes no group while a graph holds operations of it."""
        if self._captured is not None:
            self._captured.close()
        self._captured = None

    @property
    def captured(self) -> bool:
        """Whether a graph exists."""
        return self._captured is not None

    def __call__(self, batch: Batch) -> Tensor:
        """Performs a step; returns the group's loss, a device scalar that the next call may change.

        Raises:
            UsageError: "always", and an obstacle appeared only in a step.
            PydistError: the step can't be captured, with several ranks.
        """
        if self._given_up:
            return self._step(batch, batch.loss_scale)
        # On all ranks if on any: either all ranks replay or none.
        if self._captured is not None and any_rank(
            self._step.mesh.world, self._captured.is_outdated()
        ):
            self.close()
            self._alike = 0
        if self._captured is not None and batch.global_size == self._size:
            return self._captured.replay(batch)
        if self._captured is None and self._ready(batch):
            captured = self._capture(batch)
            if captured is not None:
                return captured.replay(batch)
        return self._step(batch, batch.loss_scale)

    def _ready(self, batch: Batch) -> bool:
        """Returns whether enough steps of this size have preceded."""
        self._alike = self._alike + 1 if batch.global_size == self._size else 1
        self._size = batch.global_size
        return self._alike > WARMUP

    def _capture(self, batch: Batch) -> CapturedStep | None:
        """Captures the step, or gives up if any rank has an obstacle."""
        reason = obstacle(self._step)  # a profile may have begun
        if any_rank(self._step.mesh.world, reason is not None):
            self._give_up_if(reason or "the step can't be captured on another rank")
            return None
        try:
            with phase("the capture of a CUDA graph"):
                self._captured = CapturedStep(self._step, batch)
        except (RankFailed, RankLost):
            raise
        except (RuntimeError, AssertionError, PydistError) as error:
            said = one_line(error) or type(error).__name__
            reason = f"the step can't be captured: {said}"
            if self._step.mesh.size > 1:
                raise PydistError(f'{reason}; train.cuda_graph = "never" avoids it') from error
            self._give_up_if(reason)
        return self._captured

    def _give_up_if(self, reason: str | None) -> None:
        if reason is None:
            return
        if self._wanted == "always":
            raise UsageError(f'train.cuda_graph is "always": {reason}; "auto" continues without')
        self._given_up = True
        if self._step.device.type == "cuda":  # no CUDA graph is expected on a CPU
            self._notify(f"no CUDA graph: {reason}")


def obstacle(step: TrainStep) -> str | None:
    """Returns why a step can't be captured, if that is known without trying; else `None`."""
    mesh, state = step.mesh, step.state
    if step.device.type != "cuda":
        return f"the step runs on the {step.device.type.upper()}"
    if state.network.obstacle is not None:
        return state.network.obstacle
    transport = waiting_transport(mesh.world)
    if transport is not None:
        return transport
    if mesh.session.timers.recorder is not None:
        return "the step is being profiled"
    dataset = state.loader.dataset
    shapes = {dataset.shape_of(index) for index in range(len(dataset))}
    if len(shapes) > 1:
        return f"samples have {len(shapes)} different shapes"
    return _obstacle_in_optimizer(step)


def risk(wanted: str, ranks: int) -> str | None:
    """Returns why "auto" does not risk a capture that may fail, or `None`."""
    if wanted == "auto" and ranks > 1:
        return (
            "with several ranks a capture that fails ends the job; "
            'train.cuda_graph = "always" takes the risk'
        )
    if wanted == "auto" and TorchVersion(torch.__version__) < RECOVERS:
        return (
            f"torch {torch.__version__} leaks memory if a capture fails, {RECOVERS} is the first"
            ' that does not; train.cuda_graph = "always" takes the risk'
        )
    return None


def _obstacle_in_optimizer(step: TrainStep) -> str | None:
    optimizer = step.state.optimizer
    if not all(group.get("fused") for group in optimizer.param_groups):
        return "the optimizer was made without fused=True"
    asks = step.config.amp == "fp16" and not hasattr(optimizer, "_step_supports_amp_scaling")
    if asks:
        return "fp16 with a partitioned optimizer synchronizes with the device in each step"
    return None
