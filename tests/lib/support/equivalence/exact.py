"""Split against whole bit by bit, for functions that only choose among values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist import Mesh, ShardedTensor
from support.equivalence import Cut, Points, layout_at, on_ranks, randint, shard, spatial_of


def whole_numbers(*shape: int, most: int = 2, seed: int = 0) -> Tensor:
    """Small whole numbers in fp64, many of them equal; sums of them are exact."""
    return (randint(2 * most + 1, *shape, seed=seed) - most).double()


def check_exact(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    x: Tensor,
    points: Sequence[Points],
    *beside: Cut,
    keep_thin_blocks: bool = True,
) -> None:
    """Outputs, the gradient of `x` and its gradient's gradient, equal to the whole's to the bit.

    Args:
        function: called as function(x, *beside); gives a tensor or several.
        x: cut at `points`; whole numbers, where gradients have to be added up.
        points: split points of the last dims of `x`.
        beside: more tensors, with split points of their own; without gradients.
        keep_thin_blocks: as of the mesh.
    """
    results = _results(function, x.clone().requires_grad_(), [cut.tensor for cut in beside])
    expected = [each.detach() for each in results]

    def split(mesh: Mesh) -> list[Tensor]:
        leaf = shard(x, layout_at(mesh, x.shape, points))
        others = [shard(c.tensor, layout_at(mesh, c.tensor.shape, c.points)) for c in beside]
        return [_whole(each) for each in _results(function, leaf, others)]

    for found in on_ranks(spatial_of(points), split, keep_thin_blocks=keep_thin_blocks):
        for mine, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=0, atol=0, equal_nan=True)


def _whole(each: Tensor) -> Tensor:
    return (each.full_tensor() if isinstance(each, ShardedTensor) else each).detach()


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
