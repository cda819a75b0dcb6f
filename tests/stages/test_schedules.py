"""Tests of schedules: every legal combination equals the micro-batches run in sequence."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.errors import UsageError
from pydist.stages import pipeline
from pydist.stages.micro_batch import MicroBatch
from pydist.stages.schedule import SCHEDULES, Pass, most_alive, schedule_of
from support.equivalence import Task, randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, TWO_GROUPS, check_stages, on_stages, step_of

BATCH = 8


class SmallUNet(nn.Module):
    """Two levels, with norms, in-place activations and two skips."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.norm = nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3)
        self.down = nn.Conv3d(3, 4, 3, stride=2, padding=1)
        self.deep = nn.Conv3d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose3d(4, 3, 2, stride=2)
        self.last = nn.Conv3d(6, 2, 3, padding=1)
        self.act = nn.LeakyReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        top = self.act(self.norm(self.top(x)))
        down = self.act(self.down(top))
        deep = self.act(self.deep(down)) + down
        return self.last(torch.cat([top, self.up(deep)], 1))


def unet_task(batch: int = BATCH) -> Task:
    x, target = randn(batch, 1, 6, 4, 4, seed=1), randn(batch, 2, 6, 4, 4, seed=2)
    return Task(initialized(SmallUNet()), x, target, F.mse_loss)


@pytest.mark.parametrize("skips", ["direct", "relay"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_equals_the_micro_batches_in_sequence(schedule, micro_batches, stages, skips):
    check_stages(unet_task(), [ONE] * stages, micro_batches, schedule=schedule, skips=skips)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("meshes", [[ONE] * 3, [DEEP, ONE], [TWO_GROUPS] * 2], ids=str)
def test_a_step_that_computes_activations_again(schedule, meshes):
    """Also the statistics of the batch norm are updated once."""
    check_stages(unet_task(), meshes, 4, schedule=schedule, recompute=True)


class Noisy(nn.Module):
    """Draws from torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(4, 1, 1, 1, dtype=x.dtype)


def test_random_numbers_are_the_same_when_computed_again():
    net = nn.Sequential(nn.Conv3d(1, 4, 1), nn.Dropout(0.4), Noisy(), nn.Conv3d(4, 2, 1),
                        nn.Dropout3d(0.4))  # fmt: skip
    task = unet_task()._replace(model=initialized(net))

    def gradients(stages, recompute):
        own = task._replace(model=copy.deepcopy(task.model))
        made, _ = step_of(own, stages, micro_batches=4, schedule="gpipe", recompute=recompute)
        return [p.grad for p in made.model.parameters()]

    found = []
    for recompute in (False, True):
        torch.manual_seed(5)
        # One rank at a time draws, as ranks that are threads share the generator.
        found.append(on_stages([ONE], lambda s, r=recompute: gradients(s, r)))
    kept, again = found
    for ours, theirs in zip(again, kept, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None and other is None) or torch.equal(mine, other)


def test_activations_that_are_computed_again_are_freed(monkeypatch):
    """Of the micro-batches in flight no graph is alive when the backward passes begin."""
    graphs: list[int] = []
    left = MicroBatch.backward

    def leave(self):
        if self._stages.index == 0:
            gc.collect()
            nodes = [x for x in gc.get_objects() if isinstance(x, MicroBatch) and x._sent]
            graphs.append(len([x for x in nodes if x._stages is self._stages]))
        left(self)

    monkeypatch.setattr(MicroBatch, "backward", leave)
    for recompute, most in ((False, 6), (True, 1)):
        graphs.clear()
        on_stages([ONE] * 2, lambda stages, recompute=recompute: step_of(
            unet_task(), stages, micro_batches=6, schedule="gpipe", recompute=recompute
        ))  # fmt: skip
        assert max(graphs) == most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bits_are_those_of_one_stage(schedule):
    """A rank computes what one device would: no sum is split."""

    def gradients(stages):
        task = unet_task()
        own = task._replace(model=copy.deepcopy(task.model))
        made, _ = step_of(own, stages, micro_batches=4, schedule=schedule)
        return {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}

    (whole,) = on_stages([ONE], gradients)
    for found in on_stages([ONE] * 3, gradients):
        assert found
        for name, grad in found.items():
            assert torch.equal(grad, whole[name]), name


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
def test_orders_are_complete(stages, micro_batches):
    for make in SCHEDULES.values():
        for stage in range(stages):
            passes = make(stage, stages, micro_batches)
            for kind in ("forward", "backward"):
                order = [each.micro_batch for each in passes if each.kind == kind]
                assert order == list(range(micro_batches))
            for m in range(micro_batches):
                assert passes.index(Pass("forward", m)) < passes.index(Pass("backward", m))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_peaks_of_micro_batches(stages, micro_batches):
    """GPipe keeps all, 1F1B at most as many as stages are left."""
    for stage in range(stages):
        whole = SCHEDULES["gpipe"](stage, stages, micro_batches)
        assert most_alive(whole) == micro_batches
        in_turn = SCHEDULES["1f1b"](stage, stages, micro_batches)
        assert most_alive(in_turn) == min(micro_batches, stages - stage)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_running_system_keeps_as_many(monkeypatch, schedule):
    """Counted by the micro-batches that have a graph."""
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    entered, left = MicroBatch.end_of_network, MicroBatch.backward

    def enter(self):
        stage = self._stages.index
        alive[stage] = alive.get(stage, 0) + 1
        most[stage] = max(most.get(stage, 0), alive[stage])
        entered(self)

    def leave(self):
        left(self)
        alive[self._stages.index] -= 1

    monkeypatch.setattr(MicroBatch, "end_of_network", enter)
    monkeypatch.setattr(MicroBatch, "backward", leave)
    on_stages([ONE] * 3, lambda stages: step_of(unet_task(), stages, micro_batches=8,
                                                schedule=schedule))  # fmt: skip
    expected = [8, 8, 8] if schedule == "gpipe" else [3, 2, 1]
    assert [most[stage] for stage in range(3)] == expected


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UsageError, match="gpipe, 1f1b"):
        schedule_of("zero bubble")


def test_more_micro_batches_than_samples_are_refused():
    def body(stages):
        made = pipeline(unet_task().model, stages, unet_task().x[:1], micro_batches=3)
        with pytest.raises(UsageError, match="2 samples in 3 micro-batches"):
            made.step(unet_task(2).x, unet_task(2).target, F.mse_loss)

    on_stages([ONE] * 2, body)
