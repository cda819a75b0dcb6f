"""Places the network of a run on the ranks of its job: on one mesh, or in stages.

The training loop, checkpoints and validation use a `Network`, and do not know which one it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pydist.backend.autotuner import autotuner_of
from pydist.data.axes import without_flat
from pydist.entry_hook import entry_hook_of
from pydist.errors import UsageError
from pydist.gradients import Dense
from pydist.optim import set_loss_scale, sharded
from pydist.parallel import parallelize
from pydist.stages import pipeline
from pydist.stages.division import pipeline_of
from pydist.train.config.gradients import settings
from pydist.train.device import autocast, memory_format
from pydist.train.job import Job
from pydist.train.ranks import least_samples

if TYPE_CHECKING:
    from pydist.data.loader import Batch, Loader
    from pydist.gradients.forms.settings import Gradients
    from pydist.mesh import Mesh
    from pydist.optim.partitioned import Use
    from pydist.stages.pipelines import Pipeline
    from pydist.train.config import Config
    from pydist.train.tasks import Task
    from pydist.train.tasks.base import Criterion

DENSE = Dense()
_LEAST_EXTENT = 64
"""Extent of the volume on which a network is measured that accepts several; see `_sample`."""


class Network(Protocol):
    """Network that runs on the ranks of a job, with methods that are collective over the job.

    Attributes:
        model: the network. In stages a rank has up to date only its stage's part of it.
        obstacle: why a step can't be captured as a CUDA graph, if that is so.
        notices: lines for the log when training begins.
        gradients: how they are averaged over the sample groups.
    """

    model: nn.Module
    obstacle: str | None
    notices: Sequence[str]
    gradients: Gradients

    def partitioned(self, optimizer: Optimizer, wanted: Use) -> Optimizer:
        """Returns the optimizer, partitioned over the ranks if wanted."""
        ...

    def backward(
        self,
        batch: Batch,
        criterion: Criterion,
        scale: float | Tensor,
        scaler: GradScaler,
        mixed: AbstractContextManager[Any],
    ) -> Tensor:
        """Runs the forward and backward passes of a training step, or of a part of its batch.

        Args:
            batch: the samples.
            criterion: computes the loss from the output and the targets, of these samples or of a
                micro-batch of them.
            scale: factor of the loss, 0 where the samples are padding; see `Batch.loss_scale`.
            scaler: scales the loss further, as gradients need it.
            mixed: autocast, for the forward pass.

        Returns:
            The loss of the rank's sample group, without these factors.
        """
        ...

    def clip(self, scaler: GradScaler, optimizer: Optimizer, norm: float | None) -> None:
        """Prepares the gradients for the optimizer's step, and clips their norm, if given."""
        ...

    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Returns the output for a batch, without a graph; `None` where another stage has it.

        Collective over the ranks with one data index: groups may have different numbers of batches.
        So batch norms without running statistics form those of the group's samples.
        """
        ...

    def collect(self, rows: list[Tensor], indices: list[int]) -> Tensor:
        """Returns the rows of all samples in their order, `[samples, ...]` float64, on all ranks.

        Args:
            rows: of the rank's group; none where `evaluate` has returned `None`.
            indices: of their samples.
        """
        ...

    def state(self, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the states of the whole network and of its optimizer."""
        ...

    def tuning(self) -> list[Any]:
        """Returns the choices of kernels of all ranks, for checkpoints and files."""
        ...

    def own_tuning(self, tuning: list[Any]) -> list[Any]:
        """Returns those choices of kernels in `tuning` that this rank's mesh uses."""
        ...


class MeshNetwork:
    """Network that is parallelized on one mesh; see `Network`."""

    def __init__(self, model: nn.Module, mesh: Mesh, gradients: Gradients = DENSE) -> None:
        self.model, self._mesh = model, mesh
        self.notices: Sequence[str] = ()
        self.gradients = gradients
        self.obstacle = (
            f'gradients = "{gradients.name}" decides on the host in each step'
            if gradients.keeps
            else None
        )

    def partitioned(self, optimizer: Optimizer, wanted: Use) -> Optimizer:
        """Partitions the optimizer over the mesh, if wanted."""
        return sharded(optimizer, self.model, wanted)

    def backward(
        self,
        batch: Batch,
        criterion: Criterion,
        scale: float | Tensor,
        scaler: GradScaler,
        mixed: AbstractContextManager[Any],
    ) -> Tensor:
        """Runs the passes; the last part of a step reduces the gradient of all of them."""
        with nullcontext() if batch.is_last else entry_hook_of(self.model).no_sync():
            with mixed:
                loss = _checked(criterion(self.model(batch.inputs), batch.targets))
            scaled = scaler.scale(loss * scale)
            if self.gradients.keeps:  # the scale is read from the device
                set_loss_scale(self.model, scaler.get_scale())
            scaled.backward()
        return loss.detach()

    def clip(self, scaler: GradScaler, optimizer: Optimizer, norm: float | None) -> None:
        """Clips the gradients, which are equal on all ranks."""
        if norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Returns the output, on all ranks."""
        with torch.no_grad(), entry_hook_of(self.model).normed_by_group():
            output: Tensor = self.model(inputs)
        return output

    def collect(self, rows: list[Tensor], indices: list[int]) -> Tensor:
        """Gathers the rows over the data axis."""
        return _collected(rows, indices, self._mesh)

    def state(self, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the states, in which parts of a partitioned optimizer are gathered."""
        return dict(self.model.state_dict()), optimizer.state_dict()

    def tuning(self) -> list[Any]:
        """Returns the choices of each sample group."""
        return list(autotuner_of(self._mesh).everyones())

    def own_tuning(self, tuning: list[Any]) -> list[Any]:
        """Returns all choices."""
        return tuning


class StagedNetwork:
    """A network in stages, which trains in micro-batches; see `Network`."""

    obstacle: str | None = "the network is in stages, whose hosts exchange messages in each step"

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe, self.model, self._stages = pipe, pipe.model, pipe.stages
        self._job = Job.of(pipe.stages)
        self._mesh = pipe.stages.mesh
        self.gradients = entry_hook_of(pipe.model).gradients
        self.notices: Sequence[str] = [
            f"the stages, as parts of a sample's time on one rank:\n{pipe.plan}"
        ]
        self._ahead = 0

    def partitioned(self, optimizer: Optimizer, wanted: Use) -> Optimizer:
        """Partitions the optimizer of each stage over the stage's own ranks, if wanted."""
        return sharded(optimizer, self.model, wanted)

    def backward(
        self,
        batch: Batch,
        criterion: Criterion,
        scale: float | Tensor,
        scaler: GradScaler,
        mixed: AbstractContextManager[Any],
    ) -> Tensor:
        """Runs the passes of the batch's micro-batches."""
        mesh = self._mesh
        least = least_samples(batch.global_size, mesh.data_size, mesh.shares.get("data"))
        with mixed:
            loss = self._pipe.step(
                batch.inputs,
                batch.targets,
                lambda output, targets: scaler.scale(criterion(output, targets) * scale),
                micro_batches=min(batch.parts, least),
            )
        return loss / (scaler.get_scale() * scale)

    def clip(self, scaler: GradScaler, optimizer: Optimizer, norm: float | None) -> None:
        """Lets an overflow on one stage count on all, and clips the norm over all stages."""
        self._pipe.unscale_(scaler, optimizer)
        if norm is not None:
            self._pipe.clip_grad_norm_(norm)

    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Returns the output on the last stage."""
        with entry_hook_of(self.model).normed_by_group():
            output: Tensor | None = self._pipe(inputs)
        self._ahead += 1
        if self._stages.is_last:
            self._answer()
        self._wait_until_ahead(self._stages.count)
        return output

    def collect(self, rows: list[Tensor], indices: list[int]) -> Tensor:
        """Gathers the rows of the last stage, and sends them to all."""
        self._wait_until_ahead(0)
        stages = self._stages
        message = b""
        if stages.is_last:
            found = _collected(rows, indices, self._mesh)
            message = json.dumps(list(found.shape)).encode() + b"\n" + found.numpy().tobytes()
        message = stages.world.broadcast_bytes(message, self._job.writer)
        shape, _, content = message.partition(b"\n")
        return torch.frombuffer(bytearray(content), dtype=torch.float64).view(json.loads(shape))

    def state(self, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the states of all stages."""
        self._pipe.gather()
        return dict(self.model.state_dict()), self._pipe.optimizer_state(optimizer)

    def tuning(self) -> list[Any]:
        """Returns the choices of each sample group of the first mesh, then of the next."""
        everyones = self._stages.world.all_gather_json(autotuner_of(self._mesh).everyones())
        firsts = (everyones[mesh.rank(0, 0)] for mesh in self._stages.meshes)
        return [each for found in firsts for each in found]

    def own_tuning(self, tuning: list[Any]) -> list[Any]:
        """Returns the choices of this mesh, if another run had as many meshes."""
        size = len(tuning) // len(self._stages.meshes)
        return tuning[self._stages.index * size :][:size] or tuning

    def _answer(self) -> None:
        """Tells earlier stages that the last one has computed a batch of an evaluation."""
        if self._mesh.sample_index == 0:
            for mesh in self._stages.meshes:
                for index in range(0 if mesh is self._stages.own else mesh.sample_size):
                    self._stages.send_bytes(b".", mesh.rank(self._mesh.data_index, index))

    def _wait_until_ahead(self, most: int) -> None:
        """Waits until this stage is at most `most` batches ahead of the last one.

        Stages do not wait for each other otherwise, and what they have sent stays in memory.
        """
        last = self._job.with_output(self._mesh.data_index)
        while self._ahead > most and not self._stages.is_last:
            self._stages.receive_bytes(last)
            self._ahead -= 1


def place_network(
    model: nn.Module, job: Job, task: Task, loader: Loader, config: Config
) -> Network:
    """Places a plain network on the ranks of a job. Collective.

    Args:
        model: the network, on the loader's device.
        job: the ranks.
        task: of the network.
        loader: the training batches.
        config: the run's configuration.

    Raises:
        UsageError: a description of stages does not suit the network or the data, or the network
            makes different calls in two passes.
        NotSupported: a network in stages reads values in its forward pass.
    """
    gradients = settings(config.train.gradients, loader.sampler.steps_until)
    if job.stages is None:
        parallelize(
            model, job.mesh, batch_norm=config.model.statistics,
            sharded_weights=config.mesh.sharded_weights, gradients=gradients,
        )  # fmt: skip
        return MeshNetwork(model, job.mesh, gradients)
    left = loader.sampler.shortest(config.train.epochs)
    if left < job.mesh.data_size:
        raise UsageError(
            f"mesh.stages with mesh.data = {job.mesh.data_size}: the last batch of an epoch has "
            f"{left} of {len(loader.dataset)} samples, fewer than one for each sample group: "
            "choose another train.batch"
        )
    wanted, sample = config.mesh, _sample(loader, task, config)
    with autocast(sample.device, config.train.amp):  # the plan is that of these kernels
        pipe = pipeline(
            model,
            job.stages,
            sample,
            micro_batches=wanted.micro_batches,
            schedule=wanted.schedule,
            balance=wanted.balance,
            state=1 + config.optimizer.at(config.train.batch).state(),
            cuts=wanted.cuts,
            recompute=wanted.recompute,
            batch_norm=config.model.statistics,
            running_statistics=wanted.running_statistics,
            sharded_weights=wanted.sharded_weights,
            gradients=gradients,
        )
    return StagedNetwork(pipe)


def _checked(loss: object) -> Tensor:
    """Returns the loss of a task's criterion.

    Raises:
        UsageError: it is not one number, or has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        found = f"a tensor of {kind}" if isinstance(loss, Tensor) else kind
        raise UsageError(
            f"the task's criterion returned {found}: a tensor with one number is needed, the mean "
            "over the samples"
        )
    if not loss.requires_grad:
        raise UsageError(
            "the task's criterion returned a loss without a gradient: it is detached, was computed "
            "under no_grad, or does not depend on the output"
        )
    return loss


def network_of(model: nn.Module) -> tuple[Job, Network]:
    """Returns the ranks of a network of the user's own loop, and the network on them.

    Raises:
        UsageError: it is not parallelized.
    """
    pipe = pipeline_of(model)
    if pipe is not None:
        return Job.of(pipe.stages), StagedNetwork(pipe)
    entry = entry_hook_of(model)
    return Job.of(entry.mesh), MeshNetwork(model, entry.mesh, entry.gradients)


def _sample(loader: Loader, task: Task, config: Config) -> Tensor:
    """Returns an input on which a rank can run the whole network, to measure its calls.

    A network of voxels accepts small volumes, and any makes the same calls.
    """
    channels, *extents = without_flat(loader.dataset.shape_of(0), loader.dims)
    if task.multiple is not None:
        units = max(4, _LEAST_EXTENT // task.multiple)
        extents = [min(extent, units * task.multiple) for extent in extents]
    sample = torch.zeros(1, channels, *extents, dtype=loader.dataset.dtype, device=loader.device)
    return sample.contiguous(memory_format=memory_format(config.train, loader.device))


def _collected(rows: list[Tensor], indices: list[int], mesh: Mesh) -> Tensor:
    """Gathers the rows of all sample groups of a mesh, equal on every rank of it."""
    dims = 4
    shape = torch.zeros(dims, dtype=torch.int64)
    if rows:
        shape[: rows[0].dim() - 1] = torch.tensor(rows[0].shape[1:])
    mesh.data.all_reduce(shape, "max")  # a group may have no samples
    mine = torch.cat(rows).cpu() if rows else torch.empty(0)
    everyones = mesh.data.all_gather_bytes(mine.numpy().tobytes())
    found = torch.frombuffer(bytearray(b"".join(everyones)), dtype=torch.float64)
    numbers = mesh.data.all_gather_json(indices)
    order = torch.tensor([index for each in numbers for index in each]).argsort()
    return found.reshape(-1, *(n for n in shape.tolist() if n))[order]
