"""A whole training step as one CUDA graph: captured once, replayed for every batch of its size.

Launching the thousands of kernels of a step from Python takes longer than the kernels do, where
shards are small. A graph has them all, exchanges and the optimizer included, and one launch.

What changes from step to step lies in memory that the graph reads: inputs, targets, the scale of
the loss, learning rates and the keys of random numbers. What stays in Python (schedule, counters,
checkpoints) is unaware of it, so that a step is the same with and without a graph.

Capture and replay follow https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import UsageError
from pydist.ops.pointwise.keyed import ReplayedKeys
from pydist.tensor import ShardedTensor
from pydist.train.agree import any_rank
from pydist.train.device import host_transport
from pydist.train.step import TrainStep

if TYPE_CHECKING:
    from pydist.data.loader import Batch

WARMUP = 5
"""Steps of a size before it is captured: they make plans, buffers and optimizer state, choose
kernels, and prove what later ones trust."""


class GraphedStep:
    """Takes training steps, by a graph as soon and as far as that is possible.

    All ranks decide alike: by the size of the global batch, by what they were given, and together
    where a capture has failed.

    Args:
        step: the step.
        wanted: "auto"; "always" raises what is in the way; "never".
        notify: called once with the line that says why there is no graph.

    Raises:
        UsageError: "always", and there can't be one.
    """

    def __init__(self, step: TrainStep, wanted: str, notify: Callable[[str], None]) -> None:
        self._step, self._wanted, self._notify = step, wanted, notify
        self._captured: _Captured | None = None
        self._size, self._alike = 0, 0
        self._given_up = wanted == "never"
        if not self._given_up:
            self._give_up_if(obstacle(step))

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._captured is not None

    def __call__(self, batch: Batch) -> Tensor:
        """One step; returns the group's loss, a scalar on the device that the next call may change.

        Raises:
            UsageError: "always", and something is in the way that only a step could show.
        """
        if self._given_up:
            return self._step(batch, batch.loss_scale)
        if self._captured is not None and batch.global_size == self._size:
            return self._captured.replay(batch)
        if self._captured is None and self._ready(batch):
            captured = self._capture(batch)
            if captured is not None:
                return captured.replay(batch)
        return self._step(batch, batch.loss_scale)

    def _ready(self, batch: Batch) -> bool:
        """Whether enough steps of this size have gone before."""
        self._alike = self._alike + 1 if batch.global_size == self._size else 1
        self._size = batch.global_size
        return self._alike > WARMUP

    def _capture(self, batch: Batch) -> _Captured | None:
        """Captures the step, or gives up if something is in the way of that on any rank."""
        reason = obstacle(self._step)  # a profile may have begun
        if reason is None:
            try:
                self._captured = _Captured(self._step, batch)
            except (RuntimeError, AssertionError) as error:
                said = " ".join(str(error).split()) or type(error).__name__
                reason = f"the step can't be captured: {said}"
        if any_rank(self._step.mesh.world, reason is not None):
            self._captured = None
            self._give_up_if(reason or "the step can't be captured on another rank")
        return self._captured

    def _give_up_if(self, reason: str | None) -> None:
        if reason is None:
            return
        if self._wanted == "always":
            raise UsageError(f'train.cuda_graph is "always": {reason}; "auto" goes on without')
        self._given_up = True
        if self._step.device.type == "cuda":  # nobody expects a CUDA graph on a CPU
            self._notify(f"no CUDA graph: {reason}")


def obstacle(step: TrainStep) -> str | None:
    """What keeps a step from being captured, as far as that can be known without trying."""
    mesh, state = step.mesh, step.state
    if step.device.type != "cuda":
        return f"the step runs on the {step.device.type.upper()}"
    transport = host_transport(mesh)
    if transport is not None:
        return transport
    if mesh.timers.recorder is not None:
        return "the step is being profiled"
    dataset = state.loader.dataset
    shapes = {dataset.shape_of(index) for index in range(len(dataset))}
    if len(shapes) > 1:
        return f"samples have {len(shapes)} different shapes"
    return _obstacle_in_optimizer(step)


def _obstacle_in_optimizer(step: TrainStep) -> str | None:
    optimizer = step.state.optimizer
    if not all(group.get("fused") for group in optimizer.param_groups):
        return "the optimizer was made without fused=True"
    asks = step.config.amp == "fp16" and not hasattr(optimizer, "_step_supports_amp_scaling")
    if asks:
        return "fp16 with an optimizer step shared by the ranks asks the device whether to take it"
    return None


class _Captured:
    """A captured step, with the memory that it reads what changes from."""

    def __init__(self, step: TrainStep, batch: Batch) -> None:
        self._step = step
        self._inputs = batch.inputs.to_local().clone()
        self._targets = _local(batch.targets).clone()
        self._scale = torch.tensor(batch.loss_scale, device=step.device)
        groups = step.state.optimizer.param_groups
        self._rates = [torch.tensor(float(g["lr"]), device=step.device) for g in groups]
        self._layout, self._first = batch.inputs.layout, batch.first_sample
        static = replace(
            batch,
            inputs=ShardedTensor.from_local(self._inputs, self._layout, self._first),
            targets=_like(batch.targets, self._targets, self._first),
        )
        self._graph = torch.cuda.CUDAGraph()
        self._keys = ReplayedKeys(step.mesh, step.device)
        # The loader's thread goes on meanwhile: what it does on its stream is none of ours.
        captured = torch.cuda.graph(
            self._graph,
            stream=torch.cuda.current_stream(step.device),
            capture_error_mode="thread_local",
        )
        with (
            _not_counted(step, self._keys),
            capturable(step.state.optimizer, self._rates),
            captured,
        ):
            self._loss = step(static, self._scale)

    def replay(self, batch: Batch) -> Tensor:
        """Takes the step on another batch."""
        if batch.inputs.layout != self._layout or batch.first_sample != self._first:
            raise AssertionError("batches of one size lie differently: please report this")
        self._inputs.copy_(batch.inputs.to_local(), non_blocking=True)
        self._targets.copy_(_local(batch.targets), non_blocking=True)
        self._scale.fill_(batch.loss_scale)
        for rate, group in zip(self._rates, self._step.state.optimizer.param_groups, strict=True):
            rate.fill_(float(group["lr"]))
        self._step.mesh.forwards += 1
        self._keys.renew()
        self._graph.replay()
        return self._loss


@contextmanager
def capturable(optimizer: Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Learning rates are read from tensors within the block, and numbers again after it.

    So schedules and checkpoints know numbers only.
    """
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        yield
    finally:
        for group, old in zip(groups, before, strict=True):
            group.update({name: old[name] for name in ("lr", "capturable") if name in old})


@contextmanager
def _not_counted(step: TrainStep, keys: ReplayedKeys) -> Iterator[None]:
    """A captured step has not happened: counters stand afterwards as they stood before.

    After a capture that failed, nothing of the step that was begun is left either.
    """
    mesh, state = step.mesh, step.state
    forwards, mesh.replayed_keys = mesh.forwards, keys
    try:
        yield
    except BaseException:
        state.optimizer.zero_grad()
        for name in ("grad_scale", "found_inf"):
            state.optimizer.__dict__.pop(name, None)
        state.scaler.__dict__.get("_per_optimizer_states", {}).clear()  # none if it is disabled
        raise
    finally:
        mesh.replayed_keys = None
        mesh.draws.pop(mesh.forwards, None)
        mesh.forwards = forwards


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor


def _like(tensor: Tensor, local: Tensor, first_sample: int) -> Tensor:
    """`local`, sharded if `tensor` is."""
    if not isinstance(tensor, ShardedTensor):
        return local
    return ShardedTensor.from_local(local, tensor.layout, first_sample)
