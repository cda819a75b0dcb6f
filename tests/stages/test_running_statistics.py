"""Tests of running statistics that change once for a batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist.errors import NotSupported, UsageError
from pydist.stages import pipeline
from support.equivalence import Task, randn
from support.networks.small import initialized
from support.staged import (
    DEEP,
    ONE,
    TWO_GROUPS,
    in_sequence,
    on_stages,
    results,
    step_of,
)
from support.staged_unet import unet_task


def with_batch_statistics(task: Task, micro_batches: int, data: int = 1) -> dict[str, Tensor]:
    """Returns the buffers after a step whose micro-batches change running statistics once."""
    given: dict[str, list[Tensor]] = {}
    model = copy.deepcopy(task.model)
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm3d):
            keep = given.setdefault(name, [])
            module.register_forward_pre_hook(lambda _, args, keep=keep: keep.append(args[0]))
    in_sequence(task._replace(model=model), micro_batches, data=data, copies=False)
    found = {}
    for name, inputs in given.items():
        alone = copy.deepcopy(task.model.get_submodule(name))
        alone(torch.cat(inputs).detach())
        found |= {f"{name}.{key}": value for key, value in alone.named_buffers()}
    return found


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("meshes", "options"),
    [([ONE], {}), ([ONE] * 3, {}), ([ONE] * 3, {"recompute": True}), ([DEEP, ONE], {}),
     ([TWO_GROUPS] * 2, {}), ([ONE] * 2, {"order": [0, 1, 1, 0]}),
     ([ONE] * 2, {"schedule": "gems"}), ([TWO_GROUPS] * 3, {"schedule": "gems"})], ids=str,
)  # fmt: skip
def test_running_statistics_of_the_batch(meshes, options, momentum):
    """They are those of torch's batch norm on what all micro-batches give it."""
    task = unet_task(12)
    task.model.norm.momentum = momentum
    task.model.down = nn.Sequential(task.model.down, initialized(nn.BatchNorm3d(4)))
    task.model.down[1].num_batches_tracked.fill_(3)
    data, order = meshes[0].get("data", 1), options.pop("order", None)
    expected = with_batch_statistics(task, 3, data)
    grads = in_sequence(task, 3, data=data)

    def rank(stages):
        own = task._replace(model=copy.deepcopy(task.model))
        made, loss = step_of(own, stages, micro_batches=3, running_statistics="batch", **options)
        found = results(made, loss)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)
        for name, _ in task.model.named_parameters():
            torch.testing.assert_close(found[name], grads[name], rtol=1e-9, atol=1e-12, msg=name)

    on_stages(meshes, rank, order=order)


def test_running_statistics_that_can_not_be_of_the_batch():
    def body(stages):
        net = nn.Sequential(nn.Conv3d(1, 2, 1), nn.InstanceNorm3d(2, track_running_stats=True))
        for given in ({"running_statistics": "step"}, {"batch_norm": "rank"}):
            with pytest.raises(UsageError, match="possible"):
                pipeline(net, stages, unet_task().x, **{"running_statistics": "batch", **given})
        made = pipeline(initialized(net), stages, unet_task().x, running_statistics="batch")
        with pytest.raises(NotSupported, match="batch norm with both running statistics"):
            made.step(unet_task().x, unet_task().target, F.mse_loss)

    on_stages([ONE] * 2, body)


class Checkpointed(nn.Module):
    """Normalizes features in a part that backward repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.part = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, self.first(x), use_reentrant=False))


@pytest.mark.parametrize("meshes", [[ONE] * 2, [DEEP, ONE], [TWO_GROUPS] * 2], ids=str)
def test_norms_of_plain_tensors_under_checkpoints(meshes):
    """Backward repeats them with the statistics of their micro-batch, of all groups."""
    x, target = randn(10, 6, seed=1), randn(10, 6, seed=2)
    task = Task(initialized(Checkpointed()), x, target, F.mse_loss)
    data = meshes[0].get("data", 1)
    expected = in_sequence(task, 2, data=data)
    once = copy.deepcopy(task.model)
    once.part[:2](once.first(x))

    def rank(stages):
        own = task._replace(model=copy.deepcopy(task.model))
        options = {"cuts": ["last"], "micro_batches": 2, "running_statistics": "batch"}
        found = results(*step_of(own, stages, **options))
        for name, _ in task.model.named_parameters():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)
        for name in ("part.1.running_mean", "part.1.running_var"):
            torch.testing.assert_close(found[name], once.get_buffer(name))

    on_stages(meshes, rank)
