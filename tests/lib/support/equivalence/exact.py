"""Bitwise comparison with the one-device run, for functions that only select values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist import Mesh
from support.equivalence import (
    Cut,
    Points,
    layout_at,
    on_ranks,
    randint,
    shard,
    spatial_of,
    whole_of,
)


def whole_numbers(*shape: int, most: int = 2, seed: int = 0) -> Tensor:
    """Returns small integers in fp64, many of them equal; their sums are exact."""
    return (randint(2 * most + 1, *shape, seed=seed) - most).double()


def check_exact(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    x: Tensor,
    points: Sequence[Points],
    *beside: Cut,
    keep_thin_blocks: bool = True,
) -> None:
    """Compares outputs and the first and second gradients of `x` bit by bit.

    Args:
        function: called as function(x, *beside); returns a tensor or several.
        x: cut at `points`; integers, if gradients have to be summed.
        points: split points of the last dims of `x`.
        beside: more tensors, with their own split points; without gradients.
        keep_thin_blocks: option of the mesh.
    """
    results = _results(function, x.clone().requires_grad_(), [cut.tensor for cut in beside])
    expected = [each.detach() for each in results]

    def split(mesh: Mesh) -> list[Tensor]:
        leaf = shard(x, layout_at(mesh, x.shape, points))
        others = [shard(c.tensor, layout_at(mesh, c.tensor.shape, c.points)) for c in beside]
        return [whole_of(each).detach() for each in _results(function, leaf, others)]

    for found in on_ranks(spatial_of(points), split, keep_thin_blocks=keep_thin_blocks):
        for mine, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=0, atol=0, equal_nan=True)


def _results(function: Callable[..., Any], x: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    returned = function(x, *others)
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    y = outputs[0]
    # The gradient is linear in the scale, whose own gradient is that map's adjoint.
    scale = torch.ones((), dtype=y.dtype, requires_grad=True)
    loss = (y * whole_numbers(*y.shape, seed=3).to(y.dtype) * scale).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    along = (grad * whole_numbers(*x.shape, seed=4).to(y.dtype)).sum()
    return [*outputs, grad, *torch.autograd.grad(along, scale)]
