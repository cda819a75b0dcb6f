"""Tests of call histories: differences between ranks are named; looks of one rank are allowed."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, distribute_tensor, parallelize
from pydist.comm import Transport, run_local
from pydist.errors import UsageError

NUMBERS = {
    "product": lambda x, draw: draw() * x,
    "of few digits": lambda x, draw: x * round(draw(), 1),
    "integer": lambda x, draw: x.mul(int(100 * draw())),
    "negative": lambda x, draw: x * (-1 if draw() < 0.5 else -2),
    "alpha": lambda x, draw: x.add(x, alpha=draw()),
    "lerp": lambda x, draw: torch.lerp(x, x.square(), draw()),
    "clamp": lambda x, draw: x.clamp(max=draw()),
    "in place": lambda x, draw: x.mul_(draw()),
    "assigned": lambda x, draw: _assigned(x, draw()),
    "of NumPy": lambda x, draw: x * np.float32(draw()),
    "minus one or two": lambda x, draw: x.mul(-1 - (draw() < 0.5)),
    "not a number": lambda x, draw: x.clamp(max=math.nan if draw() < 0.5 else 1.0),
    "complex": lambda x, draw: (x * complex(1, draw())).abs(),
    "option of a function": lambda x, draw: F.leaky_relu(x, draw()),
    "dropout": lambda x, draw: F.dropout(x, draw()),
    "channel": lambda x, draw: x[:, int(8 * draw())],
    "call": lambda x, draw: torch.relu(x) if draw() < 0.5 else x,
    "another call": lambda x, draw: torch.sin(x) if draw() < 0.5 else torch.cos(x),
    "after a reduction": lambda x, draw: x.mean((2, 3, 4)) * round(draw(), 1),
    "of a block": lambda x, draw: (x * round(draw(), 1)).to_local(),
    "of the whole": lambda x, draw: (x * round(draw(), 1)).full_tensor(),
    "index in a tensor": lambda x, draw: x[:, torch.tensor(int(8 * draw()))],
    "index in an array": lambda x, draw: x[:, np.array(int(8 * draw()))],
    "index in an object": lambda x, draw: x[:, Index(int(8 * draw()))],
    "bounds in tensors": lambda x, draw: x[:, (i := torch.tensor(int(5 * draw()))) : i + 3],
    "assigned at a tensor": lambda x, draw: _assigned(x, 0, torch.tensor(int(8 * draw()))),
    "repeated by a tensor": lambda x, draw: x.repeat(1, torch.tensor(1 + (draw() < 0.5)), 1, 1, 1),
    "probability in a tensor": lambda x, draw: F.dropout(x, torch.tensor(draw())),
    "boolean of NumPy": lambda x, draw: x + x.tanh() * np.bool_(draw() < 0.5),
    "sign of zero": lambda x, draw: x.copysign(-0.0 if draw() < 0.5 else 0.0),
    "precision": lambda x, draw: x.to(torch.bfloat16).float() if draw() < 0.5 else x,
    "detach": lambda x, draw: x * (x.sin().detach() if draw() < 0.5 else x.sin()),
    "detach in place": lambda x, draw: x * (_detached(x.sin()) if draw() < 0.5 else x.sin()),
    "data": lambda x, draw: x * (x.sin().data if draw() < 0.5 else x.sin()),
    "within a backward pass": lambda x, draw: _looked_at(x, draw()),
}


class Index:
    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


def _detached(x):
    return x.detach_()


def _looked_at(x, number):
    """Registers a hook that trains the convolution a second time."""
    shown = x * 1
    other = (x.detach().requires_grad_() * number).sum()
    shown.register_hook(lambda _: other.backward())
    return shown


def _assigned(x, number, channel=slice(1)):
    x = x * 1
    x[:, channel] = number
    return x


@pytest.mark.parametrize("use", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_are_drawn_are_noticed(use) -> None:
    def body(t: Transport, seed: int) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        model = parallelize(nn.Conv3d(1, 8, 3, padding=1), mesh)
        draws = random.Random(seed)
        for _ in range(3):
            use(model(torch.ones(1, 1, 6, 4, 4)), draws.random).square().mean().backward()

    with pytest.raises(UsageError, match="the ranks make different calls"):
        run_local(lambda t: body(t, t.rank + 1), 2)
    run_local(lambda t: body(t, 5), 2)


def test_numbers_that_differ_are_named() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        y = model(torch.ones(1, 1, 6, 4, 4))
        if t.rank == 1:
            y.abs()  # only on this rank
        (y.sin() * (0.5 + t.rank)).square().mean().backward()

    with pytest.raises(UsageError, match=r"mul\(0.5\) on rank 0 and mul\(1.5\) on rank 1"):
        run_local(body, 2)


def test_a_look_of_one_rank_before_a_gradient_penalty_is_no_difference() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        conv = nn.Conv3d(2, 3, (3, 1, 1), padding=(2, 0, 0), dilation=(2, 1, 1))
        model = parallelize(conv.double(), mesh)
        x = distribute_tensor(torch.ones(1, 2, 1, 1, 1).double(), mesh).requires_grad_()
        y = model(x)
        if t.rank == 0:
            y.to_local()
        loss = y.square().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + g.square().sum()).backward()

    run_local(body, 2)


def test_a_look_of_one_rank_into_a_checkpointed_part_is_no_difference() -> None:
    """Nested passes that start from shards recompute that part and exchange."""

    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        part = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.PReLU())
        model = parallelize(part.double(), mesh)
        if t.rank == 0:
            model[1].register_forward_hook(lambda _, __, y: y.to_local() is None or None)
        values = torch.randn(1, 2, 6, 4, 4, generator=torch.Generator().manual_seed(0))
        x = distribute_tensor(values.double(), mesh).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False).amax()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        g.square().sum().backward()

    run_local(body, 2)


class Shifted(nn.Module):
    """Layer that uses a reduction of the full tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.sum()


@pytest.mark.parametrize("looked_at", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_look_of_one_rank_leaves_passes_of_pydist_s_own_alone(looked_at: int, size: int) -> None:
    """Double backward of a local convolution starts a pass that visits the observed layer."""
    part = nn.Sequential(Shifted(), nn.Conv3d(2, 2, 1), nn.PReLU()).double()
    head = nn.Conv3d(2, 2, 1).double()

    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(t.size, 1, 1))
        model, last = (parallelize(copy.deepcopy(each), mesh) for each in (part, head))
        if t.rank == 0:
            model[looked_at].register_forward_hook(lambda _, __, y: y.to_local() is None or None)
        values = torch.randn(1, 2, 7, 4, 4, generator=torch.Generator().manual_seed(0))
        x = distribute_tensor(values.double(), mesh).requires_grad_()
        loss = last(checkpoint(model, x, use_reentrant=False)).std()
        gs = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in gs).backward()

    run_local(body, size)


def _of_its_shard(loss, y):
    shard = y.to_local()
    torch.autograd.grad(shard.square().sum(), shard, retain_graph=True)


def _of_the_loss(loss, y):
    torch.autograd.grad(loss * 2, loss, retain_graph=True)


@pytest.mark.parametrize("look", [_of_its_shard, _of_the_loss])
@pytest.mark.parametrize("size", [2, 3])
def test_a_pass_of_one_rank_that_exchanges_nothing_is_no_difference(look, size: int) -> None:
    """Neither the pass itself nor what it leaves in the graph counts as a difference."""

    conv = nn.Conv3d(1, 2, 3, padding=1).double()

    def body(t: Transport, looking: int) -> Tensor:
        model = parallelize(copy.deepcopy(conv), Mesh(t, spatial=(size, 1, 1)))
        y = model(torch.ones(1, 1, 7, 4, 4).double())
        loss = y.full_tensor().square().mean() + y.mean()
        if t.rank == looking:
            look(loss, y)
        loss.backward()
        return model.weight.grad

    nobody = -1
    for rank_by_rank in zip(
        run_local(lambda t: body(t, 1), size),
        run_local(lambda t: body(t, nobody), size),
        strict=True,
    ):
        assert torch.equal(*rank_by_rank)


def test_a_look_of_one_rank_within_a_pass_is_no_part_of_what_the_pass_returns() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1).double(), mesh)
        x = distribute_tensor(torch.ones(1, 1, 6, 4, 4).double(), mesh).requires_grad_()
        y = model(x)
        shard = (x * 2).to_local()
        looked_at, looks = shard.square().sum(), []
        if t.rank == 1:
            y.register_hook(lambda _: looks.extend(torch.autograd.grad(looked_at, shard)))
        (g,) = torch.autograd.grad(y.square().mean(), x)
        model(x + g).square().mean().backward()
        assert len(looks) == t.rank

    run_local(body, 2)


def test_plain_results_of_a_pass_that_exchanges_nothing_carry_its_numbers() -> None:
    def body(t: Transport, factor: int) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        model = parallelize(nn.Conv3d(1, 1, 1).double(), mesh)
        x = distribute_tensor(torch.arange(96.0).reshape(1, 1, 6, 4, 4).double(), mesh)
        shard = (model(x) * factor).to_local()
        (g,) = torch.autograd.grad(shard.square().sum(), shard, create_graph=True)
        g.square().sum().backward()

    with pytest.raises(UsageError, match="the ranks make different calls"):
        run_local(lambda t: body(t, t.rank + 1), 2)
    run_local(lambda t: body(t, 2), 2)


def test_what_a_pass_that_exchanges_nothing_returns_carries_its_numbers() -> None:
    def body(t: Transport, factor: int) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        values = torch.arange(96.0).reshape(1, 1, 6, 4, 4)
        x = distribute_tensor(values, mesh).requires_grad_()
        shard = (x * factor).to_local()
        (g,) = torch.autograd.grad(shard.square().sum(), x)
        parallelize(nn.Conv3d(1, 1, 3), mesh)(x + g).mean().backward()

    with pytest.raises(UsageError, match="the ranks make different calls"):
        run_local(lambda t: body(t, t.rank + 1), 2)
    run_local(lambda t: body(t, 2), 2)


def test_numbers_are_noticed_by_autograd_grad() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(3, 1, 1)))
        loss = (model(torch.ones(1, 1, 7, 4, 4)) * (2 - t.rank % 2)).square().mean()
        torch.autograd.grad(loss, list(model.parameters()))

    with pytest.raises(UsageError, match=r"mul\(2\) on rank 0 and mul\(1\) on rank 1"):
        run_local(body, 3)


def test_numbers_without_training_are_noticed_by_the_next_batch() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        for _ in range(2):
            (model(torch.ones(1, 1, 6, 4, 4)) * (0.5 + t.rank)).mean()

    with torch.no_grad(), pytest.raises(UsageError, match=r"mul\(0.5\) on rank 0"):
        run_local(body, 2)


def test_sample_groups_may_have_numbers_of_their_own() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, data=2, spatial=(2, 1, 1))
        model = parallelize(nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2)), mesh)
        for _ in range(2):
            x = distribute_tensor(torch.ones(1, 1, 6, 4, 4), mesh) * (1.5 + mesh.data_index)
            model(x).square().mean().backward()

    run_local(body, 4)


def test_backward_passes_in_another_order_are_noticed() -> None:
    """Each exchange has a partner, but in the graph of the other forward."""

    def body(t: Transport, reverses: bool) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        x = torch.arange(96.0).reshape(1, 1, 6, 4, 4)
        losses = [model(inputs).square().mean() for inputs in (x, 2 * x + 1)]
        for loss in reversed(losses) if reverses else losses:
            loss.backward()

    with pytest.raises(UsageError, match="the same calls in another order, as of backward passes"):
        run_local(lambda t: body(t, t.rank == 1), 2)
    run_local(lambda t: body(t, True), 2)


def test_the_order_of_keywords_is_no_difference() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        keywords = {"mean": {"dim": 1, "keepdim": True}, "reversed": {"keepdim": True, "dim": 1}}
        given = keywords["reversed" if t.rank else "mean"]
        model(torch.ones(1, 1, 6, 4, 4)).mean(**given).square().mean().backward()

    run_local(body, 2)


def test_calls_that_differ_are_shown_with_all_that_differs() -> None:
    def body(t: Transport, values: list[float], name: bool) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        y = model(torch.ones(1, 1, 6, 4, 4))
        value = values[t.rank]
        y = y.clamp(min=value) if name and t.rank else y.clamp(value)
        y.mean().backward()

    with pytest.raises(UsageError, match=r"clamp\(1e-05\) on rank 0 and clamp\(1.000001e-05\)"):
        run_local(lambda t: body(t, [1e-5, 1.000001e-5], False), 2)
    with pytest.raises(UsageError, match=r"clamp\(0.5\) on rank 0 and clamp\(min=0.5\) on rank 1"):
        run_local(lambda t: body(t, [0.5, 0.5], True), 2)
