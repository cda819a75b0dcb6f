"""Tests of the adjoint of every exchange: <F x, y> = <x, F* y>, and the backward of F* is F.

In backward the gradient of a replicated value counts by its mean over the replicas. So the inner
product of a value and a gradient in a layout is the sum over the ranks, divided by the replicas.
The gradients y differ between the replicas here, since in training they are partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import Layout, Mesh, Partition, ShardedTensor, Split
from pydist.exchange.adjoints import (
    all_reduce_sum,
    average_grad,
    gather_box,
    mean_ranks,
    scale_grad,
)
from pydist.exchange.exchanger import Exchanger
from pydist.grid import SPATIAL_AXES
from pydist.partition import Box
from support.equivalence import on_ranks, randn, shard

GRID = (2, 2, 2)


class Map(NamedTuple):
    """Linear map between values on the ranks."""

    apply: Callable[[Tensor], Tensor]
    x: Tensor  # this rank's input
    copies_in: float  # ranks that hold an element of the input
    copies_out: float


def check(make: Callable[[Mesh], Map], spatial=GRID, data: int = 1) -> None:
    def body(mesh):
        f = make(mesh)
        x = f.x.detach().clone().requires_grad_()
        fx = f.apply(x)
        y = randn(*fx.shape, seed=100 + mesh.rank).requires_grad_()
        (back,) = torch.autograd.grad(fx, x, y, create_graph=True)
        v = f.x.detach()
        (again,) = torch.autograd.grad(back, y, v)
        torch.testing.assert_close(again, fx.detach(), rtol=1e-13, atol=1e-13)
        return (
            float((fx * y).detach().sum()) / f.copies_out,
            float((x * back).detach().sum()) / f.copies_in,
        )

    parts = on_ranks(spatial, body, data)
    out, into = (math.fsum(p[i] for p in parts) for i in (0, 1))
    assert out == pytest.approx(into, rel=1e-12, abs=1e-12)


# -- redistribution -------------------------------------------------------------------------


@st.composite
def splits(
    draw: st.DrawFn, shape: tuple[int, ...]
) -> tuple[tuple[tuple[str, ...], list[int]] | None, ...]:
    """Draws the axes that cut each dim and the points; unused axes hold replicas."""
    home = {axis: draw(st.sampled_from([None, *range(len(shape))])) for axis in SPATIAL_AXES}
    out = []
    for dim, extent in enumerate(shape):
        axes = tuple(a for a in SPATIAL_AXES if home[a] == dim)
        inner = [draw(st.integers(0, extent)) for _ in range(2 ** len(axes) - 1)]
        out.append((axes, [0, *sorted(inner), extent]) if axes else None)
    return tuple(out)


def layout_of(mesh: Mesh, shape, drawn) -> Layout:
    return Layout(mesh, shape, [d and Split(d[0], Partition(d[1])) for d in drawn])


SHAPE = (3, 4, 2)


@given(source=splits(SHAPE), target=splits(SHAPE))
def test_redistribution_between_any_two_layouts(source, target):
    def make(mesh):
        a, b = layout_of(mesh, SHAPE, source), layout_of(mesh, SHAPE, target)
        return Map(
            lambda x: ShardedTensor.from_local(x, a).redistribute(b).to_local(),
            shard(randn(*SHAPE), a).to_local(),
            a.replicas,
            b.replicas,
        )

    check(make)


@given(source=splits(SHAPE), target=splits(SHAPE))
def test_redistribution_moves_every_element_to_its_place(source, target):
    def body(mesh):
        a, b = layout_of(mesh, SHAPE, source), layout_of(mesh, SHAPE, target)
        there = shard(randn(*SHAPE), a).redistribute(b)
        assert torch.equal(there.to_local(), shard(randn(*SHAPE), b).to_local())
        assert torch.equal(there.redistribute(a).full_tensor(), randn(*SHAPE))

    on_ranks(GRID, body)


# -- halos ----------------------------------------------------------------------------------


@given(data=st.data())
def test_gathered_boxes_of_any_size(data):
    """Boxes may be wider than blocks, reach beyond the domain, or be empty."""
    shape = (5, 4)
    cut = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 4)))
    needed = []
    for rank in range(4):
        lo = [data.draw(st.integers(-2, n), f"lo of rank {rank}") for n in shape]
        hi = [
            data.draw(st.integers(low, n + 2), f"hi of rank {rank}")
            for low, n in zip(lo, shape, strict=True)
        ]
        needed.append(Box(lo, hi))

    def make(mesh):
        layout = Layout(
            mesh, shape,
            [Split(("depth",), Partition([0, cut[0], 5])),
             Split(("height",), Partition([0, cut[1], 4]))],
        )  # fmt: skip
        exchanger = Exchanger(mesh.sample, layout.boxes, [[box] for box in needed])
        x = shard(randn(*shape), layout).to_local()
        return Map(lambda x: gather_box(x, exchanger, mesh), x, 1, 1)

    check(make, (2, 2, 1))


def test_what_lies_outside_the_domain_is_zero():
    def body(mesh):
        layout = Layout(mesh, (4,), [Split(("depth",), Partition([0, 1, 4]))])
        box = Box([-2], [3])
        exchanger = Exchanger(mesh.sample, layout.boxes, [[box]] * 2)
        x = shard(torch.arange(4.0) + 1, layout).to_local()
        return gather_box(x, exchanger, mesh).tolist()

    assert on_ranks((2, 1, 1), body) == [[0, 0, 1, 2, 3]] * 2


# -- sums over ranks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [
        ("depth",),
        ("depth", "width"),
        SPATIAL_AXES,
        ("data",),
        ("data", "depth"),
        ("data", *SPATIAL_AXES),
    ],
)
def test_sum_over_ranks(axes):
    def make(mesh):
        in_sample = mesh.grid.size([a for a in axes if a != "data"])
        x = randn(3, 2, seed=mesh.rank)
        return Map(lambda x: all_reduce_sum(x, mesh, axes), x, 1, in_sample)

    check(make, (2, 1, 2), data=2)


# -- entering -------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, 1, 4])
def test_entering_multiplies_the_gradient(factor):
    def make(mesh):
        return Map(lambda x: scale_grad(x, factor), randn(3, seed=mesh.rank), factor, 1)

    check(make, (2, 1, 1))


# -- gradients of replicated values ---------------------------------------------------------


@pytest.mark.parametrize("axes", [("depth",), ("depth", "width"), ("data", *SPATIAL_AXES)])
def test_the_true_gradient_is_the_mean(axes):
    def body(mesh):
        x = randn(3).requires_grad_()
        (grad,) = torch.autograd.grad(average_grad(x, mesh, axes), x, randn(3, seed=mesh.rank))
        peers = mesh.group(axes).all_gather(torch.tensor([mesh.rank])).flatten().tolist()
        expected = torch.stack([randn(3, seed=r) for r in peers]).mean(0)
        torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-13)

    on_ranks((2, 1, 2), body, data=2)


def test_the_mean_is_its_own_adjoint():
    def make(mesh):
        return Map(lambda x: mean_ranks(x, mesh, ("depth",)), randn(3, seed=mesh.rank), 1, 1)

    check(make, (2, 2, 1))


@pytest.mark.parametrize("at_end", [True, False])
def test_parameters_wait_for_the_reducer(at_end):
    """A parameter's gradient is averaged once, at the leaf; other gradients during backward."""

    def body(mesh):
        weight = randn(3, 1, seed=1).requires_grad_()
        weight = nn.Parameter(weight.detach()) if at_end else weight
        x = shard(
            randn(3, 4), Layout(mesh, (3, 4), [None, Split(("depth",), Partition([0, 1, 4]))])
        )
        (grad,) = torch.autograd.grad((x * weight).square().sum(), weight)
        expected = 2 * randn(3, 1, seed=1) * randn(3, 4).square().sum(1, keepdim=True)
        found = mesh.sample.all_gather(grad)
        torch.testing.assert_close(found.mean(0), expected, rtol=1e-13, atol=1e-13)
        assert torch.equal(found[0], found[1])

    on_ranks((2, 1, 1), body)


EXCHANGES = {
    "all_reduce_sum": lambda x, mesh: all_reduce_sum(x, mesh, ("depth",)),
    "gather_box": lambda x, mesh: ShardedTensor.from_local(
        x, Layout(mesh, (8,), [Split(("depth",), Partition([0, 4, 8]))])
    ).full_tensor(),
    "mean_ranks": lambda x, mesh: mean_ranks(x, mesh, ("depth",)),
    "average_grad": lambda x, mesh: average_grad(x, mesh, ("depth",)),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_checkpointing_recomputes_before_an_exchange_goes_back(name):
    """It does so even without other saved tensors that trigger the recomputation."""

    def body(mesh):
        runs = []

        def region(x):
            runs.append(0)
            return EXCHANGES[name](x, mesh)

        x = randn(4).requires_grad_()
        checkpoint(region, x, use_reentrant=False).sum().backward()
        assert len(runs) == 2

    on_ranks((2, 1, 1), body)


# -- around autograd ------------------------------------------------------------------------


def test_a_gradient_that_autograd_knows_to_be_zero_travels():
    """Its tensor has no storage."""

    def body(mesh):
        layout = Layout(mesh, (4,), [Split(("depth",), Partition([0, 1, 4]))])
        zero = torch._efficientzerotensor(layout.local_shape, dtype=torch.float64)
        return ShardedTensor.from_local(zero, layout).full_tensor()

    for found in on_ranks((2, 1, 1), body):
        assert torch.equal(found, torch.zeros(4).double())


@pytest.mark.parametrize("view", ["expanded", "transposed", "negative"])
def test_tensors_of_any_strides_travel(view):
    whole = {
        "expanded": randn(4, 1).expand(4, 3),
        "transposed": randn(3, 4).t(),
        "negative": torch._neg_view(randn(4, 3)),
    }[view]

    def body(mesh):
        layout = Layout(mesh, (4, 3), [Split(("depth",), Partition([0, 1, 4])), None])
        box = layout.box
        local = whole[box.lo[0] : box.hi[0]]
        return ShardedTensor.from_local(local, layout).full_tensor()

    for found in on_ranks((2, 1, 1), body):
        assert torch.equal(found, whole)


def test_repeated_exchanges_reuse_their_buffers():
    def body(mesh):
        layout = Layout(mesh, (64,), [Split(("depth",), Partition([0, 10, 64]))])
        x = shard(randn(64), layout).to_local()
        exchanger = Exchanger(mesh.sample, layout.boxes, [[Box([5], [40])]] * 2)
        first = gather_box(x, exchanger, mesh)
        made = {key: [id(w) for w in idle] for key, idle in exchanger._idle.items()}
        for _ in range(3):
            assert torch.equal(gather_box(x, exchanger, mesh), first)
        assert {key: [id(w) for w in idle] for key, idle in exchanger._idle.items()} == made

    on_ranks((2, 1, 1), body)


def test_exchanges_under_way_at_the_same_time_do_not_mix():
    """The two share a plan: a buffer belongs to one exchange until it finishes."""

    def body(mesh):
        layout = Layout(mesh, (6,), [Split(("depth",), Partition([0, 3, 6]))])
        exchanger = Exchanger(mesh.sample, layout.boxes, [[Box([2], [4])]] * 2)
        results = []
        locals_ = [shard(randn(6, seed=s), layout).to_local().detach() for s in (0, 1)]
        pending = [exchanger.start(each) for each in locals_]
        for each, wait in zip(locals_, pending, strict=True):
            slot = torch.zeros(2).double()
            mine = slice(0, 1) if mesh.rank == 0 else slice(1, 2)
            slot[mine] = each[2:3] if mesh.rank == 0 else each[0:1]
            exchanger.finish(wait, [slot])
            results.append(slot)
        return results

    for first, second in on_ranks((2, 1, 1), body):
        assert torch.equal(first, randn(6, seed=0)[2:4])
        assert torch.equal(second, randn(6, seed=1)[2:4])
