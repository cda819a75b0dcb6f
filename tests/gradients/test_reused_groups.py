"""Tests of the groups of dropped models, which the next ones use."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from pydist import parallelize
from pydist.gradients import DGC, PostLocal, PowerSGD, Torus
from pydist.gradients.registration import reducer_of
from pydist.optim import average_parameters
from support.equivalence import on_ranks, randn
from support.networks.small import initialized


def trial(mesh, gradients, steps=3):
    """Trains a new model for some steps; returns its transports, and what it has learned."""
    model = initialized(nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 9)))
    model = parallelize(model, mesh, gradients=gradients)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        x = randn(2, 3, seed=step) * (1 + mesh.data_index)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average_parameters(model, optimizer)
    learned = [p.detach().clone() for p in model.parameters()]
    lanes = reducer_of(mesh).members.lanes
    return [transport for lane in lanes for transport in lane.transports], learned


@pytest.mark.parametrize(
    "gradients",
    ["dense", "bf16", Torus(row=2), PowerSGD(rank=1), DGC(density=0.1), PostLocal(every=2)],
    ids=str,
)
def test_models_use_the_groups_of_dropped_ones(gradients):
    def body(mesh):
        seen, first = trial(mesh, gradients)
        count = len(seen)
        for _ in range(4):
            gc.collect()
            transports, learned = trial(mesh, gradients)
            seen += [each for each in transports if each not in seen]
            assert all(map(torch.equal, learned, first))
        assert len(seen) == 2 * count
        # Another form has groups of its own, and the same one again these.
        others, _ = trial(mesh, "fp16")
        assert not set(others) & set(seen)

    on_ranks((1, 1, 1), body, data=4)


def test_models_that_one_rank_keeps_have_groups_of_their_own():
    def body(mesh):
        kept = parallelize(nn.Linear(3, 3).double(), mesh)
        (lane,) = reducer_of(mesh).members.lanes
        if mesh.rank:
            del kept
            gc.collect()
        for _ in range(4):
            transports, _ = trial(mesh, "dense")
            gc.collect()
            assert lane.transport in transports
            assert len(transports) in (2, 3)
        members = reducer_of(mesh).members
        assert lane in members.lanes
        if not mesh.rank:
            del kept
            gc.collect()
        trial(mesh, "dense")
        assert lane not in members.lanes

    on_ranks((1, 1, 1), body, data=2)
