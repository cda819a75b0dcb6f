"""Tests of gradients in stages over several steps, of hooks, and of weights of two meshes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist.errors import NotSupported, RankFailed
from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, Between, on_stages

X, TARGET = randn(4, 1, 6, 4, 4, seed=1), randn(4, 2, 6, 4, 4, seed=2)


def test_gradients_are_accumulated_as_by_torch():
    """In their own memory, and hooks see the sum."""
    net = initialized(Between())

    def halved(p):
        p.grad.mul_(0.5)

    whole = copy.deepcopy(net)
    whole.first.weight.register_post_accumulate_grad_hook(halved)
    for _ in range(2):
        F.mse_loss(whole(X), TARGET).backward()

    def rank(stages):
        own = copy.deepcopy(net)
        own.first.weight.register_post_accumulate_grad_hook(halved)
        made = pipeline(own, stages, X[:1], cuts=["last"])
        made.step(X, TARGET, F.mse_loss)
        before = [p.grad for p in own.parameters()]
        made.step(X, TARGET, F.mse_loss)
        for p, grad, other in zip(own.parameters(), before, whole.parameters(), strict=True):
            assert p.grad is grad
            assert grad is None or torch.allclose(grad, other.grad, rtol=0, atol=1e-12)

    on_stages([DEEP, ONE], rank)


def test_steps_under_no_sync_are_refused():
    def rank(stages):
        made = pipeline(initialized(Between()), stages, X[:1], cuts=["last"])
        with made.model.no_sync(), pytest.raises(NotSupported, match="a step of stages under no"):
            made.step(X, TARGET, F.mse_loss)
        with made.model.no_sync():
            made.model.first.weight.square().sum().backward()
        refusal = r"added to first\.weight, a parameter of several meshes"
        with pytest.raises((NotSupported, RankFailed), match=refusal):
            made.step(X, TARGET, F.mse_loss)

    on_stages([DEEP, DEEP], rank)


def test_hooks_of_a_weight_of_two_meshes_are_warned_of():
    net = initialized(nn.Sequential(nn.Conv3d(1, 2, 1), nn.Tanh(), nn.Conv3d(2, 2, 1)))
    net[2].bias = net[0].bias

    def rank(stages):
        own = copy.deepcopy(net)
        own[0].bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        pipeline(own, stages, X[:1], cuts=["2"]).step(X, TARGET, F.mse_loss)

    with pytest.warns(UserWarning, match=r"hooks of 0\.bias, a parameter of several meshes"):
        on_stages([ONE, ONE], rank)

    def removed(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["2"])
        own[0].bias.register_hook(torch.clone).remove()
        made.step(X, TARGET, F.mse_loss)

    on_stages([DEEP, DEEP], removed)  # a warning fails the test


def _square_sum(w):
    return (w * w).sum()


@pytest.mark.parametrize("cleared", [False, True])
def test_a_parameter_that_becomes_one_of_several_meshes(cleared):
    """By a criterion that begins to penalize it, in a call that is not followed to its weights."""
    net = initialized(Between())
    with warnings.catch_warnings():  # newer torch recommends others
        warnings.simplefilter("ignore")
        square_sum = torch.jit.script(_square_sum)

    def rank(stages):
        own, whole = copy.deepcopy(net), copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"])
        made.step(X, TARGET, F.mse_loss)

        def penalized(model):
            return lambda y, t: F.mse_loss(y, t) + square_sum(model.first.weight)

        if not cleared:
            with pytest.raises(NotSupported, match=r"first\.weight was used on one mesh"):
                made.step(X, TARGET, penalized(own))
            return
        own.zero_grad()
        made.step(X, TARGET, penalized(own))
        penalized(whole)(whole(X), TARGET).backward()
        assert torch.allclose(own.first.weight.grad, whole.first.weight.grad, rtol=0, atol=1e-12)

    on_stages([ONE, ONE], rank)
