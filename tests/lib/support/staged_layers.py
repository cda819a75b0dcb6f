"""Makes a small network for tests of passes in stages, and runs its micro-batches in sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.equivalence import randn
from support.networks.small import initialized

X, TARGET = randn(8, 4, seed=1), randn(8, 4, seed=2)
ORDERS: Sequence[list[int] | None] = (None, [0, 1, 0, 1], [0, 1, 1, 0])
"""Of stages on two meshes."""


def layers(*between: nn.Module) -> nn.Module:
    """Returns linear layers, with others between."""
    return initialized(nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), *between, nn.Tanh(), nn.Linear(6, 4)
    ))  # fmt: skip


def in_sequence(
    net: nn.Module,
    micro_batches: int = 4,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    x: Tensor = X,
) -> tuple[nn.Module, float]:
    """Runs micro-batches in sequence; returns the network and the loss."""
    net, criterion = copy.deepcopy(net), copy.deepcopy(criterion)
    total = 0.0
    size = len(x) // micro_batches
    for m in range(micro_batches):
        rows = slice(m * size, (m + 1) * size)
        loss = criterion(net(x[rows].clone()), TARGET[rows].clone()) / micro_batches
        loss.backward()
        total += loss.item()
    return net, total


def assert_gradients(own: nn.Module, expected: nn.Module) -> None:
    """Checks the gradients that this rank has."""
    for (name, ours), theirs in zip(own.named_parameters(), expected.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14, msg=name)
