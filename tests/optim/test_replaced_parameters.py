"""Tests of partitioned gradients of replaced parameters that only one rank still has."""

from __future__ import annotations

import torch
from torch import nn

from pydist import Mesh, parallelize, run_local
from pydist.optim import sharded


def test_one_rank_may_keep_a_replaced_parameter_with_its_part_of_a_gradient():
    network = nn.Conv3d(1, 4, 3, padding=1)

    def body(t):
        mesh = Mesh(t, spatial=(3, 1, 1))
        model = nn.Conv3d(1, 4, 3, padding=1)
        model.load_state_dict(network.state_dict())
        model = parallelize(model, mesh)
        optimizer = sharded(torch.optim.SGD(model.parameters(), 0.1), model, "always")
        x = torch.ones(1, 1, 6, 4, 4)
        model(x).square().mean().backward()
        kept = list(model.parameters()) if t.rank == 0 else []
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        del optimizer
        model(x).square().mean().backward()  # registers the new parameters
        return len(kept), [p.grad for p in model.parameters()]

    (kept, first), *others = run_local(body, 3, timeout=30)
    assert kept == 2
    for _, grads in others:
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))
