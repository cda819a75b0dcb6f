"""Tests of optimizers whose parameters are sharded tensors, such as learned inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pydist import distribute_tensor, parallelize
from support.equivalence import on_ranks, randn


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, 0.5, momentum=0.9), lambda p: torch.optim.Adam(p, 0.1),
], ids=["sgd", "adam"])  # fmt: skip
def test_an_input_that_is_learned(make, data):
    model = nn.Conv3d(1, 2, 3, padding=1).double()
    whole = randn(2, 1, 5, 3, 2)

    def learned(x, ready):
        x = x.clone().requires_grad_()
        optimizer = make([x])
        for _ in range(3):
            optimizer.zero_grad()
            ready(x).square().mean().backward()
            optimizer.step()
        return x.detach()

    expected = learned(whole, model)

    state = model.state_dict()

    def body(mesh):
        own = nn.Conv3d(1, 2, 3, padding=1).double()
        own.load_state_dict(state)
        return learned(distribute_tensor(whole, mesh), parallelize(own, mesh)).full_tensor()

    for found in on_ranks((2, 1, 1), body, data=data):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
