"""Compares networks in stages with the same micro-batches run in sequence on one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pydist.comm import Transport, run_local
from pydist.stages import Pipeline, Stages, pipeline
from support.equivalence import Task, assert_equal, bounds_of, jittered, whole_of
from support.equivalence.core import on_one_core

ROUNDING = 1e-13
"""Gradients below this part of the largest are only rounding."""

Meshes = Sequence[Mapping[str, Any]]

ONE: Mapping[str, Any] = {}
DEEP: Mapping[str, Any] = {"spatial": (2, 1, 1)}
HIGH: Mapping[str, Any] = {"spatial": (1, 2, 1)}
TWO_GROUPS: Mapping[str, Any] = {"data": 2}

LINES = ("gpipe", "1f1b", "zero-bubble")
"""Schedules that run networks with running statistics."""


class Between(nn.Module):
    """Network of two convolutions that has a function of (network, x) between them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor] = lambda net, x: x) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 2, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.last(self.function(self, self.first(x)))


def ranks_of(meshes: Meshes) -> int:
    """Returns the number of ranks of all stages."""
    return sum(
        each.get("data", 1) * each.get("channel", 1) * math.prod(each.get("spatial", (1, 1, 1)))
        for each in meshes
    )


def on_stages(
    meshes: Meshes,
    body: Callable[[Stages], Any],
    order: Sequence[int] | None = None,
) -> list[Any]:
    """Runs `body(stages)` on every rank-thread; returns the results in rank order."""
    with on_one_core():
        return run_local(
            lambda world: body(Stages(world, meshes, order=order)), ranks_of(meshes), timeout=240
        )


def in_sequence(
    task: Task,
    micro_batches: int,
    change: Callable[[Tensor], Tensor] = lambda t: t,
    data: int = 1,
    *,
    copies: bool = True,
) -> dict[str, Tensor]:
    """Runs the micro-batches of a batch in sequence; returns loss, gradients and buffers.

    Args:
        task: the task.
        micro_batches: their number.
        change: of the parameters.
        data: number of groups, which divide the batch equally: each micro-batch has a part of each.
        copies: whether a copy of the network runs them.
    """
    model = copy.deepcopy(task.model) if copies else task.model
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(change(p))
    own = len(task.x) // data
    total = torch.zeros((), dtype=task.x.dtype)
    for m in range(micro_batches):
        a, b = own * m // micro_batches, own * (m + 1) // micro_batches
        rows = [d * own + i for d in range(data) for i in range(a, b)]
        loss = task.loss(model(task.x[rows]), task.target[rows]) * (len(rows) / len(task.x))
        loss.backward()
        total += loss.detach()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": total, **grads, **dict(model.named_buffers())}


def step_of(task: Task, stages: Stages, **options: Any) -> tuple[Pipeline, Tensor]:
    """Makes a pipeline of the task's network, and runs a step of this rank's samples."""
    options.setdefault("balance", "memory")
    made = pipeline(task.model, stages, task.x, **options)
    own = len(task.x) // stages.mesh.data_size
    rows = slice(stages.mesh.data_index * own, (stages.mesh.data_index + 1) * own)
    return made, made.step(task.x[rows], task.target[rows], task.loss)


def results(made: Pipeline, loss: Tensor) -> dict[str, Tensor]:
    """Returns loss, gradients and buffers of a step, from the stages that have them."""
    stages = made.stages
    made.gather()
    mean = loss.detach().clone().reshape(1)
    stages.mesh.data.all_reduce(mean)
    found = {"loss": mean[0] / stages.mesh.data_size}
    for name, p in made.model.named_parameters():
        held = torch.zeros(p.numel() + 1, dtype=p.dtype)
        if p.grad is not None:
            held[:-1], held[-1] = whole_of(p.grad).flatten(), 1
        everyone = [row for row in stages.world.all_gather(held) if row[-1]]
        for row in everyone[1:]:
            assert torch.equal(row, everyone[0]), f"{name} has several gradients"
        if everyone:
            found[name] = everyone[0][:-1].view(p.shape).clone()
    return {**found, **dict(made.model.named_buffers())}


def check_stages(
    task: Task,
    meshes: Meshes,
    micro_batches: int = 1,
    *,
    transport: Transport | None = None,
    order: Sequence[int] | None = None,
    **options: Any,
) -> None:
    """Compares loss, gradients and buffers of a step in stages with those of one device.

    Args:
        task: the task, with the global batch.
        meshes: of the stages.
        micro_batches: their number.
        transport: of real ranks; by default ranks are threads.
        order: the mesh of each stage.
        **options: of `pipeline`.
    """
    data = meshes[0].get("data", 1)
    expected = in_sequence(task, micro_batches, data=data)
    noisy = in_sequence(task, micro_batches, jittered, data)
    bounds = bounds_of(expected, noisy)
    # The gradient of a bias before a norm is zero except for rounding.
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, value in expected.items():
        size = float(value.abs().max())
        if value.is_floating_point() and size < ROUNDING * largest:
            bounds[name] = 4 * ROUNDING * largest / (size or 1.0)

    def rank(stages: Stages) -> None:
        own = task._replace(model=copy.deepcopy(task.model))
        made, loss = step_of(own, stages, micro_batches=micro_batches, **options)
        assert_equal(results(made, loss), expected, bounds)

    if transport is None:
        on_stages(meshes, rank, order=order)
    else:
        rank(Stages(transport, meshes, order=order))
