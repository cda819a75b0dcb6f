"""Runs training steps on one device in plain torch and in pydist, with or without a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pydist
from pydist.data.loader import Batch
from pydist.errors import PydistError
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.train.captured import capturable
from pydist.train.cuda_graph import WARMUP, GraphedStep
from pydist.train.network import MeshNetwork
from pydist.train.step import TrainStep
from pydist.train.tasks.base import Criterion

RATE = 1e-4
_BEFORE = 3
"""Steps that create optimizer state and choose kernels."""

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Creates the optimizer of MLPerf's rules."""
    return torch.optim.SGD(parameters, RATE, momentum=0.9, fused=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Creates the optimizer of the paper's networks."""
    return torch.optim.Adam(parameters, RATE, fused=True)


class Plain:
    """Training step in plain torch, which copies batches into place, as each has its own memory.

    Args:
        model: a model on the device, in the memory format of `inputs`.
        inputs: tensor [N, C, D, H, W].
        targets: tensor [N, T].
        amp: whether convolutions run in bfloat16.
        make_optimizer: creates the optimizer for the parameters.
        graph: whether the step is one CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        amp: bool,
        make_optimizer: Optimizer,
        graph: bool,
    ) -> None:
        self._model, self._amp = model, amp
        self._given = inputs, targets
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._optimizer = make_optimizer(model.parameters())
        self._graph: torch.cuda.CUDAGraph | None = None
        for _ in range(_BEFORE):
            self.loss = self._work()
        if graph:
            self._graph = torch.cuda.CUDAGraph()
            self._rates = [  # which the graph reads
                torch.tensor(float(group["lr"]), device=inputs.device)
                for group in self._optimizer.param_groups
            ]
            stream = torch.cuda.current_stream(inputs.device)
            with (
                capturable(self._optimizer, self._rates),
                torch.cuda.graph(self._graph, stream=stream),
            ):
                self.loss = self._work()

    def step(self) -> None:
        """Runs a training step."""
        self._inputs.copy_(self._given[0], non_blocking=True)
        self._targets.copy_(self._given[1], non_blocking=True)
        if self._graph is None:
            self.loss = self._work()
        else:
            self._graph.replay()

    def close(self) -> None:
        """Frees the graph's memory."""
        if self._graph is not None:
            self._graph.reset()

    def _work(self) -> Tensor:
        device = self._inputs.device.type
        with torch.autocast(device, torch.bfloat16) if self._amp else nullcontext():
            loss = F.mse_loss(self._model(self._inputs).float(), self._targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class Task:
    """Training task that has the mean squared error as its loss."""

    def criterion(self, batches: Sequence[Batch]) -> Criterion:
        """Returns the mean squared error."""
        return lambda output, targets: F.mse_loss(output.float(), targets)


class Split:
    """Training step that pydist runs on one shard: the full sample, or a rank's part of it.

    Attributes:
        model: the model, after `parallelize`.
        loss: of the last step.

    Args:
        model: a model on the device, in the memory format of `shard`.
        mesh: the mesh.
        shape: shape of the global batch.
        shard: this rank's part of the batch.
        targets: tensor [N, T].
        amp: whether convolutions run in bfloat16.
        make_optimizer: creates the optimizer for the parameters.
        graph: whether the step is one CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        shape: tuple[int, ...],
        shard: Tensor,
        targets: Tensor,
        amp: bool,
        make_optimizer: Optimizer,
        graph: bool = False,
    ) -> None:
        layout = layout_for_sample(mesh, shape)
        count = shape[0]
        inputs = pydist.ShardedTensor.from_local(shard, layout, 0)
        self._batch = Batch(
            inputs,
            targets,
            torch.ones(count),
            tuple(range(count)),
            count,
            0,
            count,
            1.0,
            0,
            0,
            count,
        )
        self.model = model = pydist.parallelize(model, mesh)
        state = SimpleNamespace(
            mesh=mesh,
            model=model,
            network=MeshNetwork(model, mesh),
            optimizer=make_optimizer(model.parameters()),
            scaler=torch.amp.GradScaler(shard.device.type, enabled=False),
            loader=SimpleNamespace(device=shard.device, dataset=_OneShape(shape[1:])),
        )
        config = SimpleNamespace(amp="bf16" if amp else "off", clip_norm=None)
        train: Any = TrainStep(state, Task(), config)  # type: ignore[arg-type]
        self._graphed = GraphedStep(train, "always" if graph else "never", print)
        for _ in range(WARMUP + 2 if graph else _BEFORE):
            self.step()
        if graph and not self._graphed.captured:
            raise PydistError("pydist's step was not captured")

    def step(self) -> None:
        """Runs a training step."""
        self.loss = self._graphed(self._batch)

    def close(self) -> None:
        """Frees the graph's memory."""
        self._graphed.close()


class _OneShape:
    """A data set with the interface that a captured step needs."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __len__(self) -> int:
        return 1

    def shape_of(self, index: int) -> tuple[int, ...]:
        return self._shape
