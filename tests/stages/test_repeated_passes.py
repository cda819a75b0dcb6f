"""Tests of several passes over a micro-batch: recomputing, and several stages on a mesh."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.stages import pipeline
from pydist.stages.micro_batch import MicroBatch
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import (
    DEEP,
    LINES,
    ONE,
    TWO_GROUPS,
    check_stages,
    on_stages,
    step_of,
)
from support.staged_unet import unet_task


def test_activations_are_computed_again_from_what_was_received():
    """The forward pass of a stage changes its argument in place."""
    layers = nn.Conv3d(1, 2, 3, padding=1), nn.LeakyReLU(0.3, inplace=True), nn.Conv3d(2, 2, 1)
    task = unet_task()._replace(model=initialized(nn.Sequential(*layers)))
    check_stages(task, [ONE, ONE], 4, cuts=["1"], schedule="gpipe", recompute=True)


@pytest.mark.parametrize("schedule", LINES)
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
    made: list[weakref.ref[MicroBatch]] = []
    make, left = MicroBatch.__init__, MicroBatch.backward

    def note(self, *args, **kwargs):
        make(self, *args, **kwargs)
        made.append(weakref.ref(self))

    def leave(self):
        if self._stages.index == 0:
            gc.collect()
            alive = [x for x in (each() for each in list(made)) if x is not None]
            graphs.append(sum(x._stages is self._stages for x in alive if x.boundary.sent))
        left(self)

    monkeypatch.setattr(MicroBatch, "__init__", note)
    monkeypatch.setattr(MicroBatch, "backward", leave)
    for recompute, most in ((False, 6), (True, 1)):
        graphs.clear()
        on_stages([ONE] * 2, lambda stages, recompute=recompute: step_of(
            unet_task(), stages, micro_batches=6, schedule="gpipe", recompute=recompute
        ))  # fmt: skip
        assert max(graphs) == most


class Counting(nn.Module):
    """Changes its buffers and attributes, draws, and changes its argument in place."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.draws, self.number, self.seen = draws, 0, []
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.number += 1
        self.seen.append(self.number)
        x -= 0.5 * len(self.seen)
        y = self.norm(self.a(x).add_(self.count))
        z = self.b(y.mul_(self.number))
        if self.draws:
            z = z * torch.rand(4, dtype=x.dtype)
        return self.c(self.spectral(z.mul_(3)) + y) + x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", [[0], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0]], ids=str)
def test_what_a_forward_pass_changes_changes_once(order, recompute):
    """Also where several passes run it, for the stages of a mesh or to compute it again."""
    x, target = randn(8, 4, seed=1), randn(8, 4, seed=2)
    net = initialized(Counting(draws=max(order) == 0))  # ranks are threads with one generator
    torch.manual_seed(3)
    alone = copy.deepcopy(net)
    total = 0.0
    for m in range(4):
        rows = slice(2 * m, 2 * m + 2)
        loss = F.mse_loss(alone(x[rows].clone()), target[rows]) / 4
        loss.backward()
        total += loss.item()
    grads = {n: p.grad for n, p in alone.named_parameters()}

    def body(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, x[:2].clone(), micro_batches=4, recompute=recompute)
        torch.manual_seed(3)
        loss = made.step(x.clone(), target, F.mse_loss)
        made.gather()
        assert own.seen == [1, 2, 3, 4]
        return loss.item(), own

    for loss, own in on_stages([ONE] * (max(order) + 1), body, order=order):
        assert loss == pytest.approx(total, rel=1e-12)
        for name, p in own.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, grads[name], rtol=1e-11, atol=1e-13)
        for (name, ours), theirs in zip(own.named_buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)
