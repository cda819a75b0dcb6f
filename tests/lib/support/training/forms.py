"""Reduces given gradients by the forms of `pydist.gradients`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pydist import Mesh, parallelize
from pydist.gradients.forms import topology
from pydist.gradients.forms.settings import Gradients
from pydist.optim import gradient_state
from support.equivalence import on_ranks, randn

Given = Callable[[int, int], Sequence[Tensor]]
"""Called as given(rank, step); returns the gradient of each parameter on the rank."""
SHAPES = ((6, 5), (7,), (4, 3, 2, 2, 2), (300,), (9, 40), (1, 1), (33, 31))


class Parameters(nn.Module):
    """A module of parameters of given shapes, which get given gradients."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.double) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(*shape, dtype=dtype) for shape in shapes)

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """Runs a backward pass that gives each parameter a gradient."""
        loss = [(p * g).sum() for p, g in zip(self.all, gradients, strict=True)]
        torch.stack(loss).sum().backward()

    def take(self) -> list[Tensor]:
        """Returns the gradients, and clears them."""
        found = [p.grad for p in self.all]
        self.zero_grad()
        return [g for g in found if g is not None]


def random_gradients(
    shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.double
) -> Given:
    """Returns random gradients, which differ for each rank and step."""

    def given(rank: int, step: int) -> list[Tensor]:
        return [
            randn(*shape, seed=1000 * step + 50 * rank + i).to(dtype)
            for i, shape in enumerate(shapes)
        ]

    return given


def reduce_given(
    settings: str | Gradients,
    mesh: Mesh,
    given: Given,
    steps: int = 1,
    shapes: Sequence[Sequence[int]] = SHAPES,
) -> list[list[Tensor]]:
    """Returns this rank's gradients after the reduction of each step."""
    first = given(mesh.rank, 0)
    model = parallelize(Parameters(shapes, first[0].dtype), mesh, gradients=settings)
    return _reduce_steps(model, mesh, given, steps)


def _reduce_steps(model: Any, mesh: Mesh, given: Given, steps: int) -> list[list[Tensor]]:
    found = []
    for step in range(steps):
        model.backward(given(mesh.rank, step))
        found.append(model.take())
    return found


def reduced(
    settings: str | Gradients,
    given: Given,
    groups: int = 2,
    spatial: tuple[int, int, int] = (1, 1, 1),
    steps: int = 1,
    shapes: Sequence[Sequence[int]] = SHAPES,
    **options: Any,
) -> list[list[Tensor]]:
    """Returns the gradients after each step on rank 0, which are the same bits on all ranks."""
    everyones = on_ranks(
        spatial, lambda mesh: reduce_given(settings, mesh, given, steps, shapes), groups, **options
    )
    return _same_bits(everyones)


def reduced_with_state(
    settings: Gradients, given: Given, groups: int, spatial: tuple[int, int, int], steps: int
) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Returns the gradients after each step, the same bits on all ranks, and the state."""

    def body(mesh: Mesh) -> tuple[list[list[Tensor]], dict[str, Any]]:
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        return _reduce_steps(model, mesh, given, steps), gradient_state(model)

    everyones = on_ranks(spatial, body, groups)
    return _same_bits([found for found, _ in everyones]), everyones[0][1]


def _same_bits(everyones: Sequence[list[list[Tensor]]]) -> list[list[Tensor]]:
    for theirs in everyones[1:]:
        for mine, other in zip(everyones[0], theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    return everyones[0]


def group_means(given: Given, groups: int, size: int, step: int) -> list[list[Tensor]]:
    """Returns the mean gradients of each sample group, in fp64: [group][parameter]."""
    found = []
    for group in range(groups):
        ranks = [given(rank, step) for rank in range(group * size, (group + 1) * size)]
        found.append(
            [torch.stack([g.double() for g in each]).mean(0) for each in zip(*ranks, strict=True)]
        )
    return found


def dgc_of_the_paper(
    gradients: Sequence[Sequence[Tensor]],
    density: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Computes Deep Gradient Compression of one matrix with exact top-k.

    Args:
        gradients: [step][group].
        density, momentum, nesterov, masking: see `pydist.gradients.DGC`.

    Returns:
        The gradients of the steps; u and v of each group after the last one.
    """
    u = [torch.zeros_like(g) for g in gradients[0]]
    v = [torch.zeros_like(g) for g in gradients[0]]
    count = math.ceil(density * u[0].numel())
    found = []
    for each in gradients:
        total = torch.zeros_like(u[0])
        for i, g in enumerate(each):
            if nesterov:
                u[i] = momentum * (u[i] + g)
                v[i] = v[i] + u[i] + g
            else:
                u[i] = momentum * u[i] + g
                v[i] = v[i] + u[i]
            least = v[i].abs().flatten().sort(descending=True).values[count - 1]
            mask = v[i].abs() >= least
            total += torch.where(mask, v[i], 0.0)
            v[i] = torch.where(mask, 0.0, v[i])
            if masking:
                u[i] = torch.where(mask, 0.0, u[i])
        found.append(total / len(each))
    return found, u, v


def momentum_of(
    means: Sequence[Tensor], momentum: float = 0.9, nesterov: bool = False, masking: bool = True
) -> list[Tensor]:
    """Returns the steps of torch's SGD with momentum; `masking` changes nothing."""
    del masking
    p = torch.zeros_like(means[0]).requires_grad_()
    optimizer = torch.optim.SGD([p], 1.0, momentum=momentum, nesterov=nesterov)
    found = []
    for mean in means:
        before, p.grad = p.detach().clone(), mean.clone()
        optimizer.step()
        found.append(before - p.detach())
    return found


@contextmanager
def on_hosts(sizes: Sequence[int] | Mapping[int, str]) -> Iterator[None]:
    """Lets ranks believe that they run on hosts with these numbers of ranks."""
    names = [f"host{i}" for i, size in enumerate(sizes) for _ in range(size)]
    with patch.object(topology, "own_host", lambda rank: names[rank]):
        yield
