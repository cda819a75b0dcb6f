"""Training programs in which a backward raises and the error is caught, on a mesh or one device."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from pydist import Mesh, distribute_tensor, parallelize
from pydist.optim import gather_gradients, sharded
from support.equivalence import randn
from support.networks.small import initialized

SIZES = {1: [2], 2: [1, 2], 3: [1, 2, 1]}
"""Samples of each group, by the number of groups."""


class Interrupted(Exception):
    """Error that the hooks of the programs raise."""


def _interrupt(_: Tensor) -> None:
    raise Interrupted


def network() -> nn.Module:
    return initialized(nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, 3, 3, padding=1), nn.Tanh(),
        nn.Conv3d(3, 2, 1),
    ))  # fmt: skip


def run(
    program: str, mesh: Mesh | None, groups: int, *, shared: bool, form: str = "dense"
) -> list[Tensor | None]:
    """Runs a program; returns its parameters and gradients.

    Args:
        program: words. `b` is a backward, `n` one under `no_sync`; `r2` and `R2` are the same,
            and raise when the gradient of layer 2's output is ready (`r2:1` only in group 1, with
            `4` in the others); `z` clears the gradients to None, `Z` to zero; `s` steps, `h` halves
            the gradients, `g` gathers them.
        mesh: the mesh; None for one device.
        groups: number of sample groups, whose sizes are `SIZES`.
        shared: whether to use a partitioned optimizer.
        form: how the ranks average gradients.
    """
    model: Any = network()
    sizes = SIZES[groups]
    rows = slice(0, sum(sizes))
    if mesh is not None:
        model = parallelize(model, mesh, gradients=form)
        first = sum(sizes[: mesh.data_index])
        rows = slice(first, first + sizes[mesh.data_index])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if shared and mesh is not None:
        optimizer = sharded(optimizer, model, "always")

    def backward(seed: int, paused: bool, layer: int | None = None) -> None:
        x = randn(sum(sizes), 2, 6, 4, 3, seed=seed)[rows]
        y = x if mesh is None else distribute_tensor(x, mesh)
        with model.no_sync() if paused and mesh is not None else nullcontext():
            for index, each in enumerate(model):
                y = each(y)
                if index == layer:
                    y.register_hook(_interrupt)
            y.square().mean().backward()

    for seed, word in enumerate(program.split()):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if word in "bn":
            backward(seed, word == "n")
        elif word[0] in "rR":
            layer, _, group = word[1:].partition(":")
            here = mesh is None or not group or int(group) == mesh.data_index
            with suppress(Interrupted):
                backward(seed, word[0] == "R", int(layer) if here else 4)
        elif word in "zZ":
            model.zero_grad(set_to_none=word == "z")
        elif word == "s":
            optimizer.step()
        elif word == "h":
            for grad in gradients:
                grad.mul_(0.5)
        elif mesh is not None:
            gather_gradients(model)
    if mesh is not None:
        gather_gradients(model)
    return [each for p in model.parameters() for each in (p.detach(), p.grad)]
