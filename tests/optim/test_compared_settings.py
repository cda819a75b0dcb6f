"""Tests of the comparison of a partitioned optimizer's settings between ranks."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adam

from pydist.errors import UsageError
from pydist.optim import LARS
from support.equivalence import on_ranks
from support.networks.small import loss_of
from support.training.shared_steps import train

pytestmark = pytest.mark.usefixtures("sizes")


@pytest.mark.parametrize(
    ("make", "setting", "other"),
    [
        (SGD, "lr", 0.05),
        (SGD, "lr", torch.tensor(0.05)),
        (Adam, "betas", (0.9, 0.99)),
        (Adam, "weight_decay", 0.1),
        (LARS, "lr", 0.05),
    ],
)
def test_settings_that_ranks_set_differently_are_refused(make, setting, other):
    """As by ReduceLROnPlateau, given each rank's own loss: parameters stay equal on all ranks."""

    def body(mesh):
        model, optimizer = train(mesh, "always", lambda p: make(p, lr=0.1), steps=2)
        if mesh.rank == 1:
            optimizer.param_groups[-1][setting] = other
        loss_of(model, mesh).backward()
        optimizer.step()
        with pytest.raises(UsageError, match=f"setting '{setting}' of .* ranks 0 and 1 .*equal in"):
            loss_of(model, mesh).backward()

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize(
    ("setting", "other"), [("lr", 0.1 + 1e-16), ("weight_decay", -0.0), ("foreach", False)]
)
def test_settings_that_differ_without_effect(setting, other):
    """As rounded by another processor, or for ranks on unlike devices."""

    def body(mesh):
        model, optimizer = train(mesh, "always", lambda p: Adam(p, lr=0.1), steps=2)
        if mesh.rank == 1:
            optimizer.param_groups[-1][setting] = other
        for _ in range(2):
            loss_of(model, mesh).backward()
            optimizer.step()

    on_ranks((2, 1, 1), body)
