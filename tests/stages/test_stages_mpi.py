"""Tests of stages in real jobs of processes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist.stages import Stages, init_stages, pipeline
from pydist.stages.schedule import Schedule
from support.equivalence import Task, randn
from support.networks.small import initialized
from support.networks.zoo import task_of
from support.staged import DEEP, ONE, TWO_GROUPS, check_stages

pytestmark = pytest.mark.ranks(4, mpi=("openmpi", "gloo"), seconds=240)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    "meshes", [[ONE] * 4, [TWO_GROUPS] * 2, [DEEP, DEEP], [DEEP, ONE, ONE]], ids=str
)
def test_a_step_equals_one_device(world, meshes, schedule):
    x, target = randn(8, 1, 8, 6, 6), randn(8, 2, 8, 6, 6, seed=1)
    net = nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1),
        nn.BatchNorm3d(3),
        nn.ReLU(inplace=True),
        nn.Conv3d(3, 3, 3, padding=1),
        nn.InstanceNorm3d(3, affine=True),
        nn.ReLU(inplace=True),
        nn.Conv3d(3, 2, 3, padding=1),
    )
    task = Task(initialized(net), x, target, F.mse_loss)
    check_stages(task, meshes, 4, transport=world, schedule=schedule)


@pytest.mark.parametrize(
    ("meshes", "order"),
    [([ONE] * 4, [0, 1, 2, 3, 3, 2, 1, 0]), ([DEEP] * 2, [0, 1, 0, 1]),
     ([TWO_GROUPS] * 2, [0, 1, 1, 0]), ([DEEP, ONE, ONE], [0, 1, 2, 0])], ids=str,
)  # fmt: skip
def test_several_stages_on_a_mesh(world, meshes, order):
    task = task_of("MONAI UNet")
    check_stages(task, meshes, len(task.x) // 2, transport=world, order=order)


@pytest.mark.parametrize("meshes", [[ONE] * 4, [TWO_GROUPS] * 2], ids=str)
def test_micro_batches_that_go_forth_and_back(world, meshes):
    x, target = randn(8, 1, 8, 6, 6), randn(8, 2, 8, 6, 6, seed=1)
    net = nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(inplace=True),
        nn.Conv3d(3, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Conv3d(3, 2, 3, padding=1),
    )  # fmt: skip
    task = Task(initialized(net), x, target, F.mse_loss)
    check_stages(task, meshes, 4, transport=world, schedule="gems")


@pytest.mark.parametrize("name", ["MONAI UNet", "DynUNet, deep supervision"])
def test_networks_with_skips(world, name):
    check_stages(task_of(name), [ONE] * 4, 2, transport=world)


def test_large_messages_do_not_block(world):
    """Each stage sends before the next one receives, also what no eager buffer takes."""
    stages = Stages(world, [ONE] * 4)
    net = nn.Sequential(*(nn.Conv3d(c, 4, 1) for c in (1, 4, 4, 4)))
    made = pipeline(initialized(net).float(), stages, torch.zeros(1, 1, 4, 4, 4),
                    micro_batches=8, cuts=["1", "2", "3"])  # fmt: skip
    x = torch.ones(8, 1, 24, 32, 32)
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        made._schedule = Schedule(schedule, stages.order)
        made.step(x, x.new_zeros(8, 4, 24, 32, 32), F.mse_loss)
    assert sum(p.grad is not None for p in net.parameters()) == 2


def test_stages_join_the_job(world):
    stages = init_stages([DEEP, {"channel": 2}], order=(0, 1, 0))
    assert stages.count == 3
    assert stages.is_last == (world.rank < 2)
    assert stages.index == world.rank // 2
    assert stages.mesh.spatial == ((2, 1, 1) if world.rank < 2 else (1, 1, 1))
