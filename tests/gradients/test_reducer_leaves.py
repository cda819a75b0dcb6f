"""Parameters that feed or follow a sharded call: reduced in any model, or without one."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import pydist.gradients.buckets
from pydist import distribute_tensor, parallelize
from support.equivalence import on_ranks, randn, whole_of
from support.equivalence.scripts import (
    GRIDS,
    batch,
    check_script,
    gradients,
    network,
    step_of,
)
from support.networks.small import initialized

grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


@grids
def test_a_plain_head(grid):
    def script(ready, cut):
        model = ready(network())
        head = initialized(nn.Linear(3 * 5 * 4 * 3, 2), 1)
        for seed in (0, 1):
            y = whole_of(model(cut(batch(seed)))).flatten(1)
            head(y).square().mean().backward()
        return gradients(model, head)

    check_script(script, grid)


@grids
def test_a_plain_head_on_frozen_features(grid):
    def script(ready, cut):
        model = ready(network().requires_grad_(False))
        head = initialized(nn.Linear(3 * 5 * 4 * 3, 2), 1)
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for seed in (0, 1):
            y = whole_of(model(cut(batch(seed)))).flatten(1)
            head(y).square().mean().backward()
            optimizer.step()
        return [*gradients(head), *head.parameters()]

    check_script(script, grid)


@grids
def test_a_learned_criterion(grid):
    def script(ready, cut):
        model = ready(network())
        criterion = initialized(nn.Conv3d(3, 2, 3, padding=1), 1)
        factor = nn.Parameter(randn(3, 1, 1, 1, seed=2))
        y = model(cut(batch()))
        loss = criterion(y * factor).square().mean() + factor.sum() ** 2
        loss.backward()
        again = torch.autograd.grad(
            criterion(model(cut(batch(1))) * factor).sin().mean(),
            [factor, *criterion.parameters()],
        )
        return [factor.grad, *gradients(model, criterion), *again]

    check_script(script, grid)


@pytest.mark.parametrize("alone", [1, 1 << 30])
def test_one_parameter_in_two_models(alone, monkeypatch):
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", alone)

    def script(ready, cut):
        one, two = network(), network()
        two[0].weight = one[0].weight
        one, two = ready(one), ready(two)
        x = cut(batch())
        (one(x).square().mean() + two(x).sin().mean()).backward()
        two(x).sin().mean().backward()
        return gradients(one, two)

    check_script(script, (2, (2, 1, 1)))


def test_two_models_that_train_in_turn():
    """In a GAN each step uses both models and changes one; the other's gradients are not needed."""

    def script(ready, cut):
        maker, judge = ready(network()), ready(initialized(nn.Conv3d(3, 1, 3, padding=1), 1))
        makers = torch.optim.SGD(maker.parameters(), 0.1)
        judges = torch.optim.SGD(judge.parameters(), 0.1)
        for step in range(4):
            fake = maker(cut(batch(step)))
            judge.requires_grad_(True)
            judges.zero_grad()
            real = judge(cut(batch(step, 3))).sin().mean()
            (real - judge(fake.detach()).sin().mean()).backward()
            judges.step()
            judge.requires_grad_(step % 2 == 0)
            makers.zero_grad()
            judge(fake).sin().mean().backward()
            makers.step()
        return [*maker.parameters(), *judge.parameters()]

    for grid in GRIDS[:3]:
        check_script(script, grid)


class LowRank(nn.Module):
    """Frozen convolution with a trained low-rank product added to its weight (LoRA)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1)
        self.conv.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.empty(4, 2)), nn.Parameter(torch.empty(2, 54))

    def forward(self, x):
        weight = self.conv.weight + (self.a @ self.b).view(4, 2, 3, 3, 3)
        return nn.functional.conv3d(x, weight, self.conv.bias, padding=1)


@grids
@pytest.mark.parametrize("late", [False, True], ids=["parallelized", "loose"])
@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "LoRA"])
def test_computed_weights(kind, late, grid):
    def script(ready, cut):
        module = LowRank() if kind == "LoRA" else nn.Conv3d(2, 4, 3, padding=1)
        module = initialized(module)
        if kind == "weight norm":
            module = parametrizations.weight_norm(module)
        elif kind == "spectral norm":
            torch.manual_seed(0)
            module = parametrizations.spectral_norm(module).eval()
            with torch.no_grad():
                for buffer in module.buffers():
                    buffer.copy_(torch.linspace(1, 2, buffer.numel(), dtype=torch.float64))
        other = ready(network(2) if late else module)
        y = module(cut(batch()))
        if late:
            y = y + other(cut(batch())).mean((1, 2, 3, 4), keepdim=True)
        for _ in range(2):
            y.square().mean().backward(retain_graph=True)
        return gradients(module, other)

    check_script(script, grid)


def test_a_parameter_given_as_input():
    def script(ready, cut):
        volume = nn.Parameter(batch())
        model = ready(network())
        y = model(cut(volume))
        (y.square().mean() + volume.square().sum()).backward()
        return [volume.grad, *gradients(model)]

    check_script(script)


def test_no_model_at_all():
    def script(ready, cut):
        conv = initialized(nn.Conv3d(2, 3, 3, padding=1))
        for seed in (0, 1):
            conv(cut(batch(seed))).square().mean().backward()
        return gradients(conv)

    check_script(script, (2, (2, 1, 1)))


def test_a_copy_of_the_model_and_a_model_that_is_gone():
    def script(ready, cut):
        model = ready(network())
        found = step_of(model, cut)
        twin = copy.deepcopy(model)
        del model
        gc.collect()
        found += step_of(twin, cut, 1)
        other = ready(network())
        return found + step_of(other, cut, 2) + step_of(twin, cut, 3)

    check_script(script, (2, (2, 1, 1)))


def test_replaced_parameters_that_one_rank_keeps_are_not_compared():
    def body(mesh):
        model = parallelize(network(), mesh)
        x = distribute_tensor(batch(), mesh)
        kept = []
        for _ in range(2):
            kept += [*model.parameters()] if mesh.rank == 0 else []
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            with model.no_sync():
                model(x).square().mean().backward()
            for _ in range(3):
                model(x).square().mean().backward()
        return len(kept)

    assert on_ranks((2, 1, 1), body)[1] == 0
