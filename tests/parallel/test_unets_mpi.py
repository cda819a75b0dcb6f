"""Tests of 3D U-Nets on real MPI: one step and four optimizer steps equal the one-device run."""

from __future__ import annotations

import copy

import pytest
import torch

from pydist import Mesh, parallelize
from pydist.optim import sharded
from support.equivalence import (
    Points,
    Task,
    assert_equal,
    even_points,
    layout_at,
    shard,
    train_split,
)
from support.equivalence.one_device import Reference
from support.networks.zoo import ZOO, task_of

pytestmark = pytest.mark.ranks(2, seconds=240)

NETWORKS = ["MONAI UNet", "3D U-Net"]
SPATIAL = [(2, 1, 1), (1, 1, 2)]


def points_of(name: str, spatial: tuple[int, int, int]) -> list[Points]:
    return [even_points(n, p) for n, p in zip(ZOO[name].sample[1:], spatial, strict=True)]


@pytest.mark.parametrize("spatial", SPATIAL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_forward_and_backward(world, name, dtype, spatial):
    reference = Reference(task_of(name, dtype))
    own = reference.task._replace(model=copy.deepcopy(reference.task.model))
    reference.check(train_split(own, Mesh(world, 1, spatial), points_of(name, spatial)))


def trained(task: Task, x: torch.Tensor, use: str = "") -> dict[str, torch.Tensor]:
    """Returns the parameters after four steps.

    The optimizer is not Adam, which makes large steps from gradients that are only rounding.
    """
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9)
    if use:
        optimizer = sharded(optimizer, task.model, use)
    for _ in range(4):
        optimizer.zero_grad()
        task.loss(task.model(x), task.target).backward()
        optimizer.step()
    return {name: p.detach() for name, p in task.model.named_parameters()}


@pytest.mark.parametrize("use", ["always", "never"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_of_an_optimizer(world, name, use):
    task, mesh = task_of(name), Mesh(world, 1, (2, 1, 1))
    expected = trained(task._replace(model=copy.deepcopy(task.model)), task.x)
    x = shard(task.x, layout_at(mesh, task.x.shape, points_of(name, (2, 1, 1)))).detach()
    parallelize(task.model, mesh)
    assert_equal(trained(task, x, use), expected, dict.fromkeys(expected, 1e-9))
