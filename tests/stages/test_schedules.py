"""Tests of schedules: every legal combination equals the micro-batches run in sequence."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.errors import NotSupported, UsageError
from pydist.stages import pipeline
from support.equivalence import Task, randn
from support.networks.small import initialized
from support.staged import (
    DEEP,
    LINES,
    ONE,
    TWO_GROUPS,
    check_stages,
    in_sequence,
    on_stages,
    step_of,
)
from support.staged_unet import unet_task, without_statistics

ORDERS = ([0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1], [0, 1, 0, 1, 0, 1], [0, 1, 2, 2, 1, 0], [0, 0, 0])


@pytest.mark.parametrize(
    ("micro_batches", "stages", "skips"),
    [(3, 1, "direct"), (1, 2, "direct"), (8, 2, "relay"), (2, 4, "direct"), (3, 4, "relay"),
     (4, 4, "direct"), (8, 4, "relay")],
)  # fmt: skip
@pytest.mark.parametrize("schedule", LINES)
def test_a_step_equals_the_micro_batches_in_sequence(schedule, micro_batches, stages, skips):
    check_stages(unet_task(), [ONE] * stages, micro_batches, schedule=schedule, skips=skips)


@pytest.mark.parametrize(
    ("micro_batches", "order"),
    [*((3, order) for order in ORDERS), *((8, order) for order in ORDERS[:3]),
     *((1, order) for order in (ORDERS[0], ORDERS[4]))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("schedule", LINES)
def test_several_stages_on_a_mesh(schedule, micro_batches, order):
    meshes = [ONE] * (max(order) + 1)
    check_stages(unet_task(), meshes, micro_batches, schedule=schedule, order=order)


@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_as_many_micro_batches_as_a_mesh_has_stages(micro_batches, order):
    """And twice as many: whole rounds of the interleaved schedule, which 1F1B alone has."""
    check_stages(unet_task(4), [ONE] * 2, micro_batches, schedule="1f1b", order=order)


@pytest.mark.parametrize("options", [{"recompute": True}, {"skips": "relay"}], ids=str)
@pytest.mark.parametrize("meshes", [[DEEP, ONE], [TWO_GROUPS] * 2, [DEEP, DEEP]], ids=str)
@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 1, 1, 0]], ids=str)
def test_several_stages_on_larger_meshes(order, meshes, options):
    check_stages(unet_task(), meshes, 4, order=order, **options)


@pytest.mark.parametrize(
    ("micro_batches", "stages", "skips"),
    [(3, 1, "direct"), (1, 2, "direct"), (8, 2, "relay"), (3, 3, "direct"), (8, 3, "relay"),
     (8, 4, "direct"), (3, 4, "relay")],
)  # fmt: skip
def test_micro_batches_that_go_forth_and_back(micro_batches, stages, skips):
    task = without_statistics(unet_task())
    check_stages(task, [ONE] * stages, micro_batches, schedule="gems", skips=skips)


@pytest.mark.parametrize("meshes", [[DEEP] * 2, [TWO_GROUPS] * 2], ids=str)
def test_forth_and_back_over_larger_meshes(meshes):
    """GEMS and data parallelism, and spatial parallelism."""
    check_stages(without_statistics(unet_task()), meshes, 4, schedule="gems")


@pytest.mark.parametrize(
    ("micro_batches", "meshes"),
    [(2, [ONE] * 2), (6, [ONE] * 3), (6, [TWO_GROUPS] * 2), (2, [DEEP] * 2)],
    ids=str,
)
def test_both_replicas_of_a_stage_keep_the_same_bits(micro_batches, meshes):
    """GEMS with one pair of micro-batches (MAST), and with three before each step (MASTER)."""
    task, data = without_statistics(unet_task(12)), meshes[0].get("data", 1)
    whole = copy.deepcopy(task.model)
    optimizer = torch.optim.Adam(whole.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        in_sequence(task._replace(model=whole), micro_batches, data=data, copies=False)
        optimizer.step()

    def body(stages):
        made = pipeline(copy.deepcopy(task.model), stages, task.x[:1], schedule="gems",
                        micro_batches=micro_batches, balance="memory")  # fmt: skip
        optimizer = torch.optim.Adam(made.model.parameters(), 0.01)
        own = len(task.x) // data
        rows = slice(stages.mesh.data_index * own, (stages.mesh.data_index + 1) * own)
        for _ in range(2):
            optimizer.zero_grad()
            made.step(task.x[rows], task.target[rows], task.loss)
            optimizer.step()
            for name, p in made.model.named_parameters():
                holds = stages.world.all_gather(torch.tensor([p.grad is not None]))
                every = stages.world.all_gather(p.detach())
                held = [value for value, has in zip(every, holds, strict=True) if has]
                ranks = stages.mesh.size
                meshes_of_it = {i // ranks for i, has in enumerate(holds) if has}
                assert meshes_of_it == {stages.count - 1 - each for each in meshes_of_it}, name
                assert all(torch.equal(value, held[0]) for value in held), name
        made.gather()
        for ours, theirs in zip(made.model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)

    on_stages(meshes, body)


@pytest.mark.parametrize("order", [None, [0, 1, 2, 0, 1, 2]], ids=str)
@pytest.mark.parametrize("schedule", LINES)
def test_bits_are_those_of_one_stage(schedule, order):
    """A rank computes what one device would: no sum is split."""

    def gradients(stages):
        task = unet_task()
        own = task._replace(model=copy.deepcopy(task.model))
        made, _ = step_of(own, stages, micro_batches=4, schedule=schedule)
        return {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}

    (whole,) = on_stages([ONE], gradients)
    for found in on_stages([ONE] * 3, gradients, order=order):
        assert found
        for name, grad in found.items():
            assert torch.equal(grad, whole[name]), name


def test_gems_refuses_what_it_can_not_run():
    def running_statistics(stages):
        made = pipeline(unet_task().model, stages, unet_task().x[:1], schedule="gems")
        with pytest.raises(NotSupported, match="running statistics"):
            made.step(unet_task().x, unet_task().target, F.mse_loss)

    on_stages([ONE] * 2, running_statistics)

    def other_meshes(stages):
        with pytest.raises(UsageError, match="equal meshes"):
            pipeline(unet_task().model, stages, unet_task().x[:1], schedule="gems")

    on_stages([DEEP, ONE], other_meshes)


class Twice(nn.Module):
    """The last call uses a weight; the first uses the same weight, or none."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.mid, self.last = nn.Conv3d(2, 2, 3, padding=1), nn.Conv3d(2, 2, 1)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x) if self.tied else F.relu(x)
        return self.last(self.mid(x))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", LINES)
def test_gradients_of_a_mesh_whose_first_stage_may_need_none(schedule, tied):
    """The ranks of the mesh reduce those of its last stage also if its first one has none."""
    x, target = randn(4, 2, 4, 4, 4, seed=1), randn(4, 2, 4, 4, 4, seed=2)
    task = Task(initialized(Twice(tied=tied)), x, target, F.mse_loss)
    for meshes in ([DEEP, ONE], [TWO_GROUPS] * 2):
        check_stages(task, meshes, 2, schedule=schedule, order=[0, 1, 0], cuts=["mid", "last"])


def test_more_micro_batches_than_samples_are_refused():
    def body(stages):
        made = pipeline(unet_task().model, stages, unet_task().x[:1], micro_batches=3)
        with pytest.raises(UsageError, match="2 samples in 3 micro-batches"):
            made.step(unet_task(2).x, unet_task(2).target, F.mse_loss)

    on_stages([ONE] * 2, body)
