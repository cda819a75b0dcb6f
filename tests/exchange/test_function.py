"""Tests of the base of functions whose backward exchanges: ranks run it together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, run_local
from pydist.exchange.function import ExchangeFunction


class _Sum(ExchangeFunction):
    """Sum over all ranks that saves no tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        total = x.clone()
        mesh.world.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert len(saved) == 1
        assert not saved[0].numel()
        total = grad.clone()
        ctx.mesh.world.all_reduce(total)
        return total, None


def test_a_rank_that_saves_nothing_recomputes_as_the_others_do():
    def body(world):
        mesh = Mesh(world, 1, (2, 1, 1))
        x = torch.full((1,), world.rank + 1.0, requires_grad=True)

        def region(x: Tensor) -> Tensor:
            y = _Sum.apply(x, mesh)
            return y.square() if world.rank else y + y  # only `square` saves its input

        checkpoint(region, x, use_reentrant=False).sum().backward()
        return mesh.world.ledger.count, x.grad

    (count, grad), (other, other_grad) = run_local(body, 2)
    assert count == other  # both ranks also sum in the recomputation
    assert grad == other_grad == 2 + 2 * 3


def test_the_backward_of_an_exchange_is_announced_first():
    def body(world):
        mesh, calls = Mesh(world, 1, (2, 1, 1)), []
        x = torch.ones(1, requires_grad=True)
        y = _Sum.apply(x, mesh)
        before = world.ledger.count
        mesh.session.at_backward.append(lambda: calls.append(world.ledger.count - before))
        y.backward()
        return calls

    assert run_local(body, 2) == [[0], [0]]
