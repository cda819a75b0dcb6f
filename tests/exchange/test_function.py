"""Tests of the base of functions whose backward exchanges: ranks run it together."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pydist
from pydist import Mesh, run_local
from pydist.exchange.exchanger import Exchanger
from pydist.exchange.function import ExchangeFunction, Function
from support.attention import forced
from support.equivalence import randn


class _Sum(ExchangeFunction):
    """Sum over all ranks that saves no tensors."""

    part = "statistics"

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


def exchange_functions(of: type = ExchangeFunction) -> list[type]:
    """Returns all of pydist's functions whose backward exchanges."""
    found = [each for each in of.__subclasses__() if each.__module__.startswith("pydist.")]
    return found + [deeper for each in found for deeper in exchange_functions(each)]


class Spans:
    """A recorder that knows the open spans."""

    def __init__(self) -> None:
        self.open: list[str] = []

    def begin(self, part: str, layer: str) -> bool:
        self.open.append(part)
        return True

    def end(self, begun, part, layer, start, stop, own) -> None:
        if begun:  # else the span is older than the recording
            self.open.remove(part)

    def launch(self, layer: str) -> None:
        pass

    def land(self, flight, channel) -> None:
        channel.wait()


def attention(x: Tensor, w: Tensor) -> Tensor:
    """Attends from plane to plane, which are cut over the depth."""
    planes = x.mean((3, 4)).mT * w.sum()
    with forced("ring"):
        return F.scaled_dot_product_attention(planes, planes, planes)


TIMED = ("statistics", "redistribute", "halo", "boundary", "gradients")
CALLS = {
    "convolution, ReLU and average": lambda x, w: F.avg_pool3d(
        F.conv3d(x, w, padding=1).relu_(), 2
    ),
    "average": lambda x, w: F.avg_pool3d(x * w.sum(), 3, 1, 1),
    "maximum": lambda x, w: F.max_pool3d(x * x, 3, 1, 1),
    "norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "sum": lambda x, w: x.square().sum((2, 3, 4)),
    "largest": lambda x, w: x.amax((2, 3, 4)),
    "where the largest is": lambda x, w: x.max(2)[0] * x.argmax(2),
    "adaptive": lambda x, w: F.adaptive_max_pool3d(x, (1, 2, 2)),
    "unpooled": lambda x, w: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2),
    "counts": lambda x, w: x * (x > 0).sum() * x.detach().gt(0).nonzero().shape[0],
    "reflection": lambda x, w: F.pad(x, (0, 0, 0, 0, 1, 1), "reflect"),
    "attention": attention,
    "linear": lambda x, w: F.linear(F.linear(x.mean((2, 3, 4)), w[0, :, 0, 0]), w[0, :, 0, 0].T),
}


def test_the_collectives_of_all_functions_are_timed(monkeypatch):
    used = set[type]()
    for cls in exchange_functions():

        def counted(*args: Any, cls: type = cls, apply: Any = cls.apply) -> Any:
            used.add(cls)
            return apply(*args)

        monkeypatch.setattr(cls, "apply", staticmethod(counted))

    torch.manual_seed(0)
    value, weight = torch.randn(2, 3, 8, 6, 6), torch.randn(3, 3, 3, 3, 3)

    def body(world):
        mesh, seen = Mesh(world, 1, (2, 1, 1), axes={"channel": 2}), []
        timers, spans = mesh.session.timers, Spans()

        def run(call) -> None:
            x = pydist.distribute_tensor(value, mesh).requires_grad_()
            w = weight.clone().requires_grad_()
            call(x, w).square().sum().backward()
            (grad,) = torch.autograd.grad(call(x, w).square().sum(), x, create_graph=True)
            grad.square().sum().backward()

        for name, call in CALLS.items():
            run(call)  # makes plans and groups

            def watch(what: Any, name: str = name) -> None:
                # An exchanger measures its own packing; a text names a form and exchanges nothing.
                if isinstance(what, str):
                    return
                if sys._getframe(1).f_code.co_name != Exchanger.announce.__name__:
                    seen.append((name, [part for part in spans.open if part in TIMED]))

            timers.recorder = spans
            for group in mesh.transports:
                group.watcher = watch
            run(call)
            timers.recorder = None
            for group in mesh.transports:
                group.watcher = None
        assert not spans.open
        return seen

    for seen in run_local(body, 4):
        assert {name for name, _ in seen} == {*CALLS}
        assert [name for name, parts in seen if not parts] == []
    assert {cls.__qualname__ for cls in exchange_functions() if cls not in used} == set()


def test_a_function_that_names_no_part_is_refused():
    with pytest.raises(TypeError, match="_Untimed: set `part`"):

        class _Untimed(ExchangeFunction):
            pass


def test_backward_is_outside_of_autocast():
    class Product(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (weight,) = ctx.saved_tensors
            return grad @ weight, None

    x, weight = randn(3, 4).float().requires_grad_(), randn(4, 4, seed=1).float()
    y = Product.apply(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 4) @ weight)
