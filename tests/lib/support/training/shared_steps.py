"""Trains with and without a partitioned optimizer, and compares the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from pydist import Mesh, parallelize
from pydist.optim import LAMB, LARS, ShardedOptimizer, sharded
from pydist.optim.partitioned import Use
from support.equivalence import on_ranks
from support.networks.small import loss_of, small

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
Loop = Callable[[Any, Optimizer, Mesh, int], None]
"""Called as loop(model, optimizer, mesh, step)."""

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, 0.05),
    "momentum": lambda p: SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: Adam(p, 1e-2),
    "amsgrad": lambda p: Adam(p, 1e-2, amsgrad=True, foreach=True),
    "fused": lambda p: Adam(p, 1e-2, fused=True),
    "adamw": lambda p: AdamW(p, 1e-2, maximize=True),
    "adagrad": lambda p: Adagrad(p, 1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "adamax": lambda p: Adamax(p, 1e-2),
    "nadam": lambda p: NAdam(p, 1e-2),
    "radam": lambda p: RAdam(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2, lambd=0.1, t0=1),
    "lars": lambda p: LARS(p, 1.0, weight_decay=0.01, trust_coefficient=0.01),
    "lars, torch": lambda p: LARS(p, 1.0, form="torch", nesterov=True, exclude=None),
    "lamb": lambda p: LAMB(p, 1e-2),
}


def adam(parameters: Iterable[nn.Parameter]) -> Adam:
    return Adam(parameters, 1e-2)


def train(
    mesh: Mesh,
    use: Use,
    make: Make = adam,
    loop: Loop | None = None,
    model: nn.Module | None = None,
    steps: int = 4,
) -> tuple[nn.Module, Optimizer]:
    """Runs some training steps on a mesh; returns model and optimizer."""
    model = parallelize(model or small(), mesh)
    optimizer = sharded(make(model.parameters()), model, use)
    for step in range(steps):
        if loop is None:
            loss_of(model, mesh, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loop(model, optimizer, mesh, step)
    return model, optimizer


def check(
    make: Make = adam,
    loop: Loop | None = None,
    network: Callable[[], nn.Module] = small,
    data: int = 2,
    spatial: tuple[int, int, int] = (2, 1, 1),
    bits: bool = False,
) -> list[list[Tensor]]:
    """Compares runs with and without a partitioned optimizer; returns all ranks' parameters."""

    def body(mesh: Mesh) -> list[Tensor]:
        found, optimizer = train(mesh, "always", make, loop, network())
        assert isinstance(optimizer, ShardedOptimizer)
        expected, _ = train(mesh, "never", make, loop, network())
        for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
            if bits:
                assert torch.equal(a, b), name
            else:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=name)
            copies = mesh.world.all_gather(a.detach().contiguous())
            assert (copies == copies[0]).all()
        return [p.detach().clone() for p in found.parameters()]

    return on_ranks(spatial, body, data)
