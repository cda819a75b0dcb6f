"""Tests of the state of optimizers in stages that is more than tensors by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist.errors import CheckpointError
from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import ONE, on_stages

X, TARGET = randn(4, 6, seed=1), randn(4, 6, seed=2)


class Factored(torch.optim.Optimizer):
    """Counts steps in a factor for each dim of a parameter, as those of Shampoo are."""

    elementwise = True

    def __init__(self, params, more=None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.more = more

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                factors = state.setdefault("factors", [torch.zeros(n) for n in p.shape])
                state["by dim"] = {dim: (n, factors[dim] + 1) for dim, n in enumerate(p.shape)}
                state["more"] = self.more
                torch._foreach_add_(factors, 1)


def states(more=None):
    """Returns what each rank knows of the optimizer's state after a step, and that of one rank."""
    net = initialized(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X, cuts=["1"])
        optimizer = Factored(own.parameters(), more)
        made.step(X, TARGET, F.mse_loss)
        optimizer.step()
        if more is not None:
            with pytest.raises(CheckpointError, match="can't store more: a set is neither"):
                made.optimizer_state(optimizer)
            return None
        return made.optimizer_state(optimizer)

    found = on_stages([ONE, ONE], rank)
    F.mse_loss(net(X), TARGET).backward()
    optimizer = Factored(net.parameters())
    optimizer.step()
    return found, optimizer.state_dict()


def test_nested_state_of_an_optimizer_is_known_on_all_ranks():
    found, expected = states()
    for each in found:
        torch.testing.assert_close(each, expected)


def test_a_state_that_can_not_be_sent_is_refused_on_all_ranks():
    states({1})
