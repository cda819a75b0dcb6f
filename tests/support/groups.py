"""Networks on sample groups of unequal size, beside one rank with the whole batch."""

from __future__ import annotations

import copy
import itertools

import torch
from equivalence import assert_equal, bounds_of, jittered, on_ranks, randn
from torch import nn

from pydist import Mesh, ShardedTensor, parallelize
from pydist.comm import LocalTransport


def parts(mesh: Mesh, sizes) -> slice:
    """This rank's samples."""
    ends = [0, *itertools.accumulate(sizes)]
    return slice(ends[mesh.data_index], ends[mesh.data_index + 1])


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return {name: t.detach().clone() for name, t in found.items()}


def on_groups(make, step, sizes, spatial=(1, 1, 1), **options):
    """Runs `step(model, rows, mesh)` on groups of these sizes and on one rank; compares."""
    total = sum(sizes)
    made = make()  # here, as ranks share torch's random numbers

    def body(mesh):
        model = parallelize(copy.deepcopy(made), mesh, **options)
        return step(model, parts(mesh, sizes if mesh.data_size > 1 else (total,)), mesh)

    def whole(change):
        mesh = Mesh(LocalTransport())
        model = copy.deepcopy(made)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(change(p))
        return step(parallelize(model, mesh, **options), slice(0, total), mesh)

    expected = whole(lambda p: p)
    bounds = bounds_of(expected, whole(jittered))
    for found in on_ranks(spatial, body, len(sizes)):
        assert_equal(found, expected, bounds)


def inputs(total: int) -> torch.Tensor:
    return randn(total, 2, 6, 5, 4, seed=total)


def plain(y):
    return y.full_tensor() if isinstance(y, ShardedTensor) else y
