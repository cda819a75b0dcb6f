"""Small networks with all kinds of layers that CosmoFlow has, and a function of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist import Mesh, parallelize
from support.equivalence import Task, group_slice, on_ranks, randn

BATCH = 4
SHAPE = (BATCH, 2, 12, 10, 9)


class Doubled(torch.autograd.Function):
    """Function that overrides do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def initialized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Returns the model in fp64, with newly drawn parameters.

    They do not come from the global generator, which rank-threads share.
    """
    model = model.double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            scale = p[0].numel() ** -0.5 if p.dim() > 1 else 0.1
            p.copy_(randn(*p.shape, seed=1000 * seed + i) * scale + (p.dim() == 1))
    return model


def small(norm: bool = False, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """Creates two convolutions, two pools and two linear layers, in fp64."""
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, bias=not norm),
        nn.BatchNorm3d(4) if norm else nn.Identity(),
        nn.LeakyReLU(),
        nn.AvgPool3d(3, 2, 1),
        nn.Conv3d(4, 5, 3, padding=1, stride=2),
        nn.LeakyReLU(),
        nn.AvgPool3d(3, 2, 1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(40, 6),
        nn.LeakyReLU(),
        nn.Linear(6, 3),
    )
    return initialized(model, seed)


def small_task(norm: bool = False) -> Task:
    """Creates a task of the small network with a batch of four."""
    return Task(small(norm), randn(*SHAPE, seed=1), randn(BATCH, 3, seed=2), F.mse_loss)


def loss_of(model: Callable[[Tensor], Tensor], mesh: Mesh | None, seed: int = 0) -> Tensor:
    """Returns the loss on this rank's samples of a batch of four; on all without a mesh."""
    rows = slice(None) if mesh is None else group_slice(mesh, BATCH)
    x, target = randn(*SHAPE, seed=seed), randn(BATCH, 3, seed=seed + 100)
    return F.mse_loss(model(x[rows]), target[rows])


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """Returns the gradients that the optimizer uses."""
    return [p.grad for p in model.parameters()]


def check_use(
    make: Callable[[], nn.Module],
    use: Callable[[nn.Module, Mesh | None], Sequence[Tensor | None]],
    data: int = 1,
    spatial: tuple[int, int, int] = (2, 1, 1),
    *,
    rtol: float = 1e-10,
) -> None:
    """Compares the results of `use(model, mesh or None)` on a mesh and on one device."""
    expected = use(make(), None)
    for found in on_ranks(spatial, lambda mesh: use(parallelize(make(), mesh), mesh), data):
        assert len(found) == len(expected)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert (a is None) == (b is None), i
            if b is not None:
                assert a is not None
                torch.testing.assert_close(
                    a.detach(), b.detach(), rtol=rtol, atol=1e-12, msg=partial("{}: {}".format, i)
                )
