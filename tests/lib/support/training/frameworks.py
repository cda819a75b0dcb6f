"""Defines a small task for tests of training frameworks, and trains it in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.equivalence import randint, randn
from support.networks.small import initialized

BATCH, EPOCHS, CLIP = 2, 2, 0.5
X, LABELS = randn(8, 1, 8, 6, 5), randint(2, 8, 8, 6, 5)
SAMPLES = list(zip(X, LABELS, strict=True))

Trained = tuple[list[float], list[Tensor]]
"""The loss of each batch, and the parameters at the end."""


def network() -> nn.Module:
    """Creates the network, equal at every call."""
    return initialized(
        nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1),
            nn.BatchNorm3d(4),
            nn.PReLU(),
            nn.Conv3d(4, 2, 3, padding=1),
        )
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD, as Adam makes large steps of gradients that are only rounding."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_plainly(accumulate: int = 1) -> Trained:
    """Trains on one device, with clipping and a learning rate that is halved after each step."""
    model = network()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for step in range(EPOCHS * len(X) // BATCH):
        first = step * BATCH % len(X)
        batch = slice(first, first + BATCH)
        loss = F.cross_entropy(model(X[batch]), LABELS[batch])
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


def assert_as_plainly(found: Trained, expected: Trained) -> None:
    """Checks that losses and parameters are those of one device."""
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-10, atol=1e-12)
