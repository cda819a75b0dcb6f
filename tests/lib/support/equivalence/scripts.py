"""Runs training scripts, as users write them, on one device and on a mesh, and compares both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, distribute_tensor, parallelize
from support.equivalence import assert_same, group_slice, on_ranks, randn
from support.networks.small import initialized

Ready: TypeAlias = "Callable[[nn.Module], nn.Module]"
Cut: TypeAlias = "Callable[[Tensor], Tensor]"
Script: TypeAlias = "Callable[[Ready, Cut], Sequence[Tensor | None]]"
"""Called as script(ready, cut): `ready` parallelizes a module, `cut` returns this rank's part of a
batch, a sharded tensor. Returns the tensors to compare."""

Grid: TypeAlias = "tuple[int, tuple[int, int, int]]"
GRIDS: list[Grid] = [(1, (2, 1, 1)), (2, (2, 1, 1)), (1, (3, 1, 1)), (1, (8, 1, 1))]
"""Sample groups and spatial split: even, two groups, uneven, and with empty shards."""


def on_mesh(script: Script, mesh: Mesh) -> Sequence[Tensor | None]:
    """Runs the script on this rank; cuts batches over and within the sample groups."""

    def cut(x: Tensor) -> Tensor:
        return distribute_tensor(x[group_slice(mesh, len(x))], mesh)

    return script(lambda module: parallelize(module, mesh), cut)


def check_script(script: Script, grid: Grid = (1, (2, 1, 1)), zero: float = 0.0) -> None:
    """Checks that a script's results are those of one device on every rank of a mesh.

    `zero` is that of `assert_same`.
    """
    expected = script(lambda module: module, lambda x: x)
    data, spatial = grid
    for rank, found in enumerate(on_ranks(spatial, lambda m: on_mesh(script, m), data)):
        where = f"rank {rank} of {data * math.prod(spatial)}"
        assert_same(found, expected, where=where, zero=zero)


def check_checkpointed(make: Callable[[], nn.Module], x: Tensor) -> None:
    """Checks the gradients of layers whose activations are computed again."""

    def script(ready: Ready, cut: Cut) -> list[Tensor | None]:
        model = ready(initialized(make()))
        y = checkpoint(model, cut(x), use_reentrant=False) * 1.0
        y.square().sum().backward()
        return gradients(model)

    check_script(script)


# -- a small network for scripts of one step or a few ---------------------------------------


def network(width: int = 4) -> Any:
    return initialized(
        nn.Sequential(
            nn.Conv3d(2, width, 3, padding=1), nn.Tanh(), nn.Conv3d(width, 3, 3, padding=1)
        )
    )


def batch(seed: int = 0, channels: int = 2) -> Tensor:
    return randn(2, channels, 5, 4, 3, seed=seed)


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [p.grad for m in modules for p in m.parameters()]


def step_of(model: nn.Module, cut: Cut, seed: int = 0) -> list[Tensor | None]:
    model.zero_grad()
    model(cut(batch(seed))).square().mean().backward()
    return [None if g is None else g.clone() for g in gradients(model)]
