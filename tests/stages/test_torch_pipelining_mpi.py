"""Compares steps in stages with those of torch.distributed.pipelining on the same ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from pydist.models import UNet3d
from pydist.stages import Stages
from support.equivalence import Task, assert_same, randint, randn
from support.networks.small import initialized
from support.staged import ONE, results, step_of

pytestmark = [
    pytest.mark.ranks(4, mpi=("gloo",)),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, when it copies its graphs
]

MICRO_BATCHES = 8
FORTH = [0, 1, 2, 3]


def of_torch(task: Task, cuts: Sequence[str], order: Sequence[int], kind: type, rank: int) -> Task:
    """Runs a step of torch's pipeline; returns the task with the gradients of this rank's stages.

    Args:
        task: the task.
        cuts: paths of the modules that begin the second and later stages.
        order: the rank of each stage.
        kind: torch's class of the schedule.
        rank: the rank.
    """
    split = dict.fromkeys(cuts, pipelining.SplitPoint.BEGINNING)
    traced = pipelining.pipeline(task.model, (task.x[:1],), split_spec=split)
    own = [number for number, owner in enumerate(order) if owner == rank]
    stages = [traced.build_stage(number, torch.device("cpu")) for number in own]
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    runs = kind(stages if several else stages[0], MICRO_BATCHES, loss_fn=task.loss)
    inputs = (task.x,) if 0 in own else ()
    target = {"target": task.target} if len(order) - 1 in own else {}
    runs.step(*inputs, **target)
    model = copy.deepcopy(task.model)
    for stage in stages:
        for name, p in stage.submod.named_parameters():
            model.get_parameter(name).grad = p.grad
    return task._replace(model=model)


def check(
    world, task: Task, cuts: Sequence[str], order: Sequence[int], kind: type, schedule: str
) -> None:
    """Compares all gradients that torch has on this rank."""
    expected = of_torch(task, cuts, order, kind, world.rank).model
    made, loss = step_of(
        task._replace(model=copy.deepcopy(task.model)),
        Stages(world, [ONE] * 4, order=order),
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        cuts=cuts,
    )
    found = results(made, loss)
    compared = {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}
    assert compared
    for name, grad in compared.items():
        assert_same(found[name], grad, where=name)


def chain(length: int) -> nn.Sequential:
    """Returns convolutions, each with a norm and an activation of its own."""
    blocks = (
        nn.Sequential(
            nn.Conv3d(1 if not i else 3, 3, 3, padding=1, bias=False), nn.GroupNorm(1, 3), nn.GELU()
        )
        for i in range(length)
    )
    return nn.Sequential(*blocks)


@pytest.mark.parametrize(
    ("order", "kind", "schedule"),
    [
        (FORTH, pipelining.ScheduleGPipe, "gpipe"),
        (FORTH, pipelining.Schedule1F1B, "1f1b"),
        (FORTH * 2, pipelining.ScheduleInterleaved1F1B, "1f1b"),
        (FORTH * 2, pipelining.ScheduleInterleavedZeroBubble, "zero-bubble"),
        # Not torch's V: over gloo it can't pass tensors between two stages of a rank.
    ],
    ids=["gpipe", "1f1b", "interleaved 1f1b", "interleaved zero-bubble"],
)
def test_a_chain(world, order, kind, schedule):
    x, target = randn(MICRO_BATCHES, 1, 6, 6, 6), randn(MICRO_BATCHES, 3, 6, 6, 6, seed=1)
    task = Task(initialized(chain(8)), x, target, F.mse_loss)
    cuts = [str(i * 8 // len(order)) for i in range(1, len(order))]
    check(world, task, cuts, order, kind, schedule)


def loss_of_classes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def test_skips_between_stages(world):
    x, classes = randn(MICRO_BATCHES, 1, 8, 8, 8), randint(3, MICRO_BATCHES, 8, 8, 8)
    task = Task(initialized(UNet3d(1, 3, 4, 2)).eval(), x, classes, loss_of_classes)
    paths = [path for path, module in task.model.named_modules() if isinstance(module, nn.Conv3d)]
    cuts = [paths[len(paths) * i // 4] for i in (1, 2, 3)]
    check(world, task, cuts, FORTH, pipelining.ScheduleGPipe, "gpipe")
