"""Captures a training step in a CUDA graph, replays it, and restores state after both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import PydistError
from pydist.exchange.own_slice import own_slice
from pydist.gradients.reducer import Reducer
from pydist.ops.pointwise.keyed import ReplayedKeys, draws_of
from pydist.tensor import ShardedTensor

if TYPE_CHECKING:
    from pydist.data.loader import Batch
    from pydist.train.step import TrainStep


class CapturedStep:
    """Captured step, with the memory from which it reads its varying inputs.

    Args:
        step: the step; its plans, buffers and optimizer state exist already.
        batch: a batch of the size of all replayed batches.

    Raises:
        Exception: the error of the step during capture; all its effects are undone.
    """

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
        step.mesh.world.captured_in(self._graph)
        self._keys = ReplayedKeys(step.mesh, step.device)
        with (
            _not_counted(step, self._keys),
            capturable(step.state.optimizer, self._rates),
            _captured(self._graph, step.device),
        ):
            self._loss = step(static, self._scale)
        self._found = _surroundings(step)

    def is_outdated(self) -> bool:
        """Returns whether parameters, optimizer state or the reducer differ from the captured."""
        return _surroundings(self._step) != self._found

    def close(self) -> None:
        """Destroys the graph."""
        self._graph.reset()

    def replay(self, batch: Batch) -> Tensor:
        """Replays the step on another batch; returns the loss, which the next call overwrites.

        Raises:
            PydistError: the batch has another layout than the captured one.
        """
        if batch.inputs.layout != self._layout or batch.first_sample != self._first:
            raise PydistError(
                f"a batch of {batch.global_size} samples is {batch.inputs.layout} from sample"
                f" {batch.first_sample}, the one captured {self._layout} from {self._first}:"
                ' please report this; train.cuda_graph = "never" accepts both'
            )
        self._inputs.copy_(batch.inputs.to_local(), non_blocking=True)
        self._targets.copy_(_local(batch.targets), non_blocking=True)
        self._scale.fill_(batch.loss_scale)
        for rate, group in zip(self._rates, self._step.state.optimizer.param_groups, strict=True):
            rate.fill_(float(group["lr"]))
        self._step.mesh.session.forwards += 1
        self._keys.renew()
        self._graph.replay()
        return self._loss


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Captures the block; an error of the block takes precedence over one of ending the capture."""
    failure: Exception | None = None
    try:
        # Thread-local: the loader's thread continues on its own stream meanwhile.
        with torch.cuda.graph(
            graph,
            stream=torch.cuda.current_stream(device),
            capture_error_mode="thread_local",
        ):
            try:
                yield
            except Exception as error:
                failure = error
                raise
    except Exception:
        if failure is not None:
            raise failure from None
        raise


def _surroundings(step: TrainStep) -> list[object]:
    """Returns the addresses of the state that a step uses: a graph is valid only for these."""
    state = step.state
    reducer = step.mesh.session.find(Reducer)
    found: list[object] = [] if reducer is None else [reducer.members.parts]
    for parameter in state.model.parameters():
        found += (own_slice(parameter).data_ptr(), parameter.requires_grad)
    found += [buffer.data_ptr() for buffer in state.model.buffers()]
    for values in state.optimizer.state.values():
        found += [_local(each).data_ptr() for each in values.values() if isinstance(each, Tensor)]
    return found


@contextmanager
def capturable(optimizer: Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """Makes the optimizer read learning rates from tensors within the block.

    After it they are numbers again, so that schedules and checkpoints see only numbers.
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
    """Restores the counters after a capture, as a captured step has not run.

    A failed capture also undoes all other effects of the step.
    """
    mesh, state = step.mesh, step.state
    session, draws = mesh.session, draws_of(mesh)
    forwards, draws.replayed = session.forwards, keys
    try:
        yield
    except BaseException:
        for transport in mesh.transports:
            transport.forget_capture()
        if (reducer := session.find(Reducer)) is not None:
            reducer.forget_capture()
        state.optimizer.zero_grad()
        for name in ("grad_scale", "found_inf"):
            state.optimizer.__dict__.pop(name, None)
        state.scaler.__dict__.get("_per_optimizer_states", {}).clear()  # none if it is disabled
        raise
    finally:
        draws.replayed = None
        draws.forget(session.forwards)
        session.forwards = forwards


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor


def _like(tensor: Tensor, local: Tensor, first_sample: int) -> Tensor:
    """Returns `local`, sharded if `tensor` is."""
    if not isinstance(tensor, ShardedTensor):
        return local
    return ShardedTensor.from_local(local, tensor.layout, first_sample)
