"""Compares networks on sample groups of unequal size with one device on the full batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pydist import Mesh, distribute_tensor, parallelize, sum_over_groups
from pydist.comm import LocalTransport
from support.equivalence import assert_equal, bounds_of, jittered, on_ranks, randn


def parts(mesh: Mesh | None, sizes: Sequence[int]) -> slice:
    """Returns this rank's samples; all of them without a mesh."""
    ends = [0, *itertools.accumulate(sizes)]
    if mesh is None or mesh.data_size == 1:
        return slice(0, ends[-1])
    return slice(ends[mesh.data_index], ends[mesh.data_index + 1])


def cut(x: torch.Tensor, mesh: Mesh | None, *dims: Any) -> torch.Tensor:
    """Returns this rank's shard; the tensor itself without a mesh."""
    return x if mesh is None else distribute_tensor(x, mesh, *dims)


def summed(x: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
    """Returns the sum over the groups; without a mesh, the tensor itself."""
    return x if mesh is None else sum_over_groups(x, mesh)


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    return {name: t.detach().clone() for name, t in found.items()}


def on_groups(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, slice, Mesh | None], dict[str, torch.Tensor]],
    sizes: Sequence[int],
    spatial: Sequence[int] = (1, 1, 1),
    channel: int = 1,
    **options: Any,
) -> None:
    """Runs `step(model, rows, mesh)` on groups of these sizes and on one device; compares.

    One device is plain torch, with `mesh` None. For dropout it is one rank of pydist, as torch
    draws other masks.
    """
    made = make()  # here, as ranks share torch's random numbers
    drops = any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in made.modules())

    def body(mesh: Mesh) -> dict[str, torch.Tensor]:
        model = parallelize(copy.deepcopy(made), mesh, **options)
        return step(model, parts(mesh, sizes), mesh)

    def whole(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(made)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(change(p))
        mesh = Mesh(LocalTransport()) if drops else None
        model = model if mesh is None else parallelize(model, mesh, **options)
        return step(model, parts(mesh, sizes), mesh)

    expected = whole(lambda p: p)
    bounds = bounds_of(expected, whole(jittered))
    for found in on_ranks(spatial, body, len(sizes), axes={"channel": channel}):
        assert_equal(found, expected, bounds)


def inputs(total: int) -> torch.Tensor:
    return randn(total, 2, 6, 5, 4, seed=total)
