"""Tests in which one sample group evaluates with gradients enabled while the others train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pydist import distribute_tensor, parallelize, sum_over_groups
from support.equivalence import assert_same, on_ranks, randn
from support.networks.small import initialized

SIZES = [1, 2]


def train(mesh, loss, alone, tuned):
    """Returns the gradients after three backward passes.

    Args:
        mesh: the ranks, in two groups; None means one device.
        loss: the kind of loss.
        alone: whether the second group evaluates between forward and backward.
        tuned: whether the model trains in evaluation mode.
    """
    net = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv3d(3, 2, 1))
    model = initialized(net) if mesh is None else parallelize(initialized(net), mesh)
    learned, kept = nn.Parameter(randn(2, 1, 1, 1)), []
    model[1].register_forward_hook(lambda _, args, y: kept.append(y))

    def cut(seed):
        x = randn(sum(SIZES), 2, 6, 4, 3, seed=seed)
        if mesh is None:
            return x
        first = sum(SIZES[: mesh.data_index])
        return distribute_tensor(x[first:][: SIZES[mesh.data_index]], mesh)

    for step in range(3):
        y = model.train(not tuned)(cut(step))
        feature = kept.pop()
        if alone and mesh is not None and mesh.data_index == 1:
            model.eval()(cut(10))
            kept.pop()
        if loss == "learned":  # its gradient arrives before backward reaches the output
            value = (y * learned).square().mean()
        elif loss == "feature":
            value = feature.square().mean()
        elif loss == "penalty":
            value = sum(p.square().sum() for p in model.parameters())
        else:
            value, count = (y * learned).square().sum(), torch.tensor(float(y.numel()))
            if mesh is not None:
                value, count = sum_over_groups(value, mesh), sum_over_groups(count, mesh)
            value = value / count
        value.backward()
    return [p.grad for p in (*model.parameters(), learned)]


@pytest.mark.parametrize("tuned", [False, True], ids=["training", "evaluation mode"])
@pytest.mark.parametrize("loss", ["learned", "feature", "penalty", "sums"])
@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)], ids=str)
def test_gradients_are_those_of_the_batch_that_the_loss_comes_from(spatial, loss, tuned):
    expected = train(None, loss, False, tuned)

    def body(mesh):
        for alone in (False, True):
            assert_same(train(mesh, loss, alone, tuned), expected, where=f"alone={alone}")

    on_ranks(spatial, body, 2)


@pytest.mark.parametrize("training", [False, True])
def test_a_head_on_a_frozen_network_weighs_samples_alike(training):
    def script(mesh):
        model, head = initialized(nn.Conv3d(2, 3, 3, padding=1)), initialized(nn.Linear(216, 2))
        model.requires_grad_(False).train(training)
        rows = slice(None) if mesh is None else slice(mesh.data_index, 1 + 2 * mesh.data_index)
        if mesh is not None:
            model = parallelize(model, mesh)
        for seed in range(2):
            x = randn(3, 2, 6, 4, 3, seed=seed)[rows]
            y = model(x).full_tensor() if mesh is not None else model(x)
            head(y.flatten(1)).square().mean().backward()
        return [p.grad for p in head.parameters()]

    expected = script(None)
    on_ranks((2, 1, 1), lambda mesh: assert_same(script(mesh), expected), 2)
