"""Creates and runs a small network with sharded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pydist
from pydist import Mesh
from support.equivalence import on_ranks, randn


def _made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


NETWORK = _made()
"""Not made in the ranks, which are threads that share torch's generator."""


def network() -> nn.Sequential:
    """Returns a new network, equal at every call."""
    made: nn.Sequential = copy.deepcopy(NETWORK)  # type: ignore[assignment]  # deepcopy keeps the type
    return made


def parallel(mesh: Mesh, model: nn.Module | None = None) -> Any:
    """Returns a network with sharded weights."""
    return pydist.parallelize(network() if model is None else model, mesh, sharded_weights=True)


def batch(mesh: Mesh | None = None, seed: int = 0) -> Tensor:
    """Returns the batch, or the rows of this rank's sample group."""
    x = randn(4, 6, seed=seed)
    if mesh is None:
        return x
    return pydist.distribute_tensor(x.chunk(mesh.data_size)[mesh.data_index], mesh, {})


def backward(model: nn.Module, x: Tensor) -> None:
    """Computes gradients."""
    model(x).sin().square().mean().backward()


def weights(model: nn.Module) -> list[Tensor]:
    """Returns copies of the whole parameters."""
    return [tensor.clone() for tensor in model.state_dict().values()]


def on_channels(body: Callable[[Mesh], Any], channel: int = 2, **options: Any) -> list[Any]:
    """Runs `body(mesh)` on every rank of a mesh that has a channel axis."""
    return on_ranks((1, 1, 1), body, axes={"channel": channel}, **options)
