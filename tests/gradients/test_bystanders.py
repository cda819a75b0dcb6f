"""Tests of what the reducer leaves alone: others' gradients, optimizers, and older means."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pydist.gradients.buckets
from pydist import Mesh, distribute_tensor, parallelize, run_local
from pydist.gradients import PowerSGD
from pydist.gradients.registration import reducer_of
from pydist.optim import gradient_state
from support.equivalence import on_ranks, randn, whole_of
from support.networks.small import initialized

X = randn(2, 4, 4, 4, 4)


class Two(nn.Module):
    """Network of two layers that are called one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return getattr(self, which)(x)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_another_mesh_in_one_request(create_graph):
    """Slices of weights would be averaged with each other."""
    net = initialized(nn.Sequential(nn.Conv3d(4, 64, 1), nn.Tanh(), nn.Conv3d(64, 4, 1)))
    expected = torch.autograd.grad(net(X).square().mean(), [*net.parameters()])

    def rank(world):
        channels, groups = Mesh(world, axes={"channel": 2}), Mesh(world, data=2)
        one = parallelize(copy.deepcopy(net), channels, sharded_weights=True)
        two = parallelize(copy.deepcopy(net), groups)
        of_one = one(distribute_tensor(X, channels)).square().mean()
        of_two = two(X[world.rank : world.rank + 1]).square().mean()
        found = torch.autograd.grad(
            of_one + of_two,
            [*one.parameters(), *two.parameters()],
            allow_unused=True,
            create_graph=create_graph,
        )
        for mine, grad in zip(found, (*expected, *expected), strict=True):
            assert torch.allclose(whole_of(mine), grad, rtol=0, atol=1e-12)

    run_local(rank, 2)


def test_steps_of_other_optimizers_take_any_argument():
    class Scaled(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, scale):
            for p in self.param_groups[0]["params"]:
                p.sub_((scale() if callable(scale) else scale) * p.grad)

    class Called(Scaled):
        def step(self, closure):
            super().step(lambda: closure(0.5))

    def body(mesh):
        model = parallelize(initialized(nn.Conv3d(4, 4, 1)), mesh)
        before = model.bias.detach().clone()
        for kind, given in ((Scaled, 0.5), (Called, lambda scale: scale)):
            optimizer = kind(model.parameters(), {})
            optimizer.zero_grad()
            model(X).mean().backward()
            optimizer.step(given)
        assert torch.allclose(model.bias, before - 2 * 0.5 * 0.25, rtol=0, atol=1e-12)

    for spatial, data in (((2, 1, 1), 1), ((1, 1, 1), 2)):
        on_ranks(spatial, body, data)


@pytest.mark.parametrize("kind", ["loss and output", "output", "number"])
def test_closures_return_what_they_like(kind):
    """What is a loss, or begins with one, is the mean over the groups."""

    class Closed(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                found = closure()
            super().step()
            return found

    def body(mesh):
        model = parallelize(initialized(nn.Conv3d(4, 4, 1)), mesh)
        optimizer = Closed(model.parameters(), 0.1)
        y = own = None

        def closure():
            nonlocal y, own
            optimizer.zero_grad()
            y = model(X[mesh.data_index : mesh.data_index + 1])
            own = y.square().mean()
            own.backward()
            return {"loss and output": (own, y), "output": y, "number": own.item()}[kind]

        found = optimizer.step(closure)
        loss, *others = found if isinstance(found, tuple) else (found,)
        if kind == "output":
            assert found is y
        else:
            mean = own.detach().clone().view(1)
            mesh.data.all_reduce(mean)
            assert float(loss) == pytest.approx(float(mean) / 2, rel=1e-12)
            assert not others or others[0] is y

    on_ranks((1, 1, 1), body, data=2)


@pytest.mark.parametrize("leaf", [lambda x: x.clone().requires_grad_(), nn.Parameter])
def test_a_line_search_over_a_sharded_tensor(leaf):
    """As for initial conditions, which a trained network leads to an observation."""
    net = initialized(nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.Tanh())).requires_grad_(False)

    def searched(model, x):
        optimizer = torch.optim.LBFGS([x], max_iter=4, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 0.5).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach(), x.detach()

    expected = searched(net, X.clone().requires_grad_())

    def body(mesh):
        model = parallelize(copy.deepcopy(net), mesh)
        found = searched(model, leaf(distribute_tensor(X.clone(), mesh)))
        for mine, whole in zip(found, expected, strict=True):
            assert torch.allclose(whole_of(mine), whole, rtol=0, atol=1e-12)

    on_ranks((2, 1, 1), body)


def test_gradients_that_a_script_assigns_are_averaged():
    net = initialized(Two())

    def body(mesh):
        model = parallelize(copy.deepcopy(net), mesh)
        x = randn(2, 8, seed=mesh.data_index)
        for step in range(3):
            model.zero_grad()
            model.second.weight.grad = torch.full((8, 8), step + mesh.data_index).double()
            model(x, "first").square().mean().backward()
            assert torch.equal(model.second.weight.grad, torch.full((8, 8), step + 0.5).double())

    on_ranks((1, 1, 1), body, data=2)


def test_a_copy_of_an_older_mean_is_freed(monkeypatch):
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", 1)

    def body(mesh):
        model = parallelize(initialized(Two()), mesh)
        for which in ("first", "second"):
            model(randn(2, 8), which).square().mean().backward()
        lanes = reducer_of(mesh).members.lanes
        assert all(b._flat is None for lane in lanes for b in lane.buckets)

    on_ranks((1, 1, 1), body, data=2)


@pytest.mark.parametrize("change", ["none", "clipped", "by a hook"])
@pytest.mark.parametrize("alone", [1, 1 << 30])
def test_an_older_mean_keeps_its_error_feedback(monkeypatch, alone, change):
    """A compressed gradient is sent again beside or with another one's, and stays as it was."""
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", alone)
    net = initialized(Two())
    form = PowerSGD(rank=1, start=0, least_saving=1)

    def body(mesh):
        model = parallelize(copy.deepcopy(net), mesh, gradients=form)
        x = randn(2, 8, seed=mesh.data_index)
        if change == "by a hook":
            model.first.weight.register_hook(lambda grad: 0.5 * grad)
        model(x, "first").square().sum().backward()
        if change == "clipped":
            nn.utils.clip_grad_norm_(model.first.parameters(), 1.0)
        grad = model.first.weight.grad.clone()
        errors = _errors(model)
        assert all(error.abs().max() > 0 for error in errors)
        model(x, "second").square().sum().backward()
        assert torch.equal(model.first.weight.grad, grad)
        assert all(map(torch.equal, _errors(model), errors))
        return len(errors)

    assert on_ranks((1, 1, 1), body, data=2) == [1, 0]


def test_an_assigned_gradient_takes_its_error_feedback_along():
    net = initialized(Two())
    form = PowerSGD(rank=1, start=0, least_saving=1)

    def body(mesh):
        model = parallelize(copy.deepcopy(net), mesh, gradients=form)
        x = randn(2, 8, seed=mesh.data_index)
        model(x, "first").square().sum().backward()
        before = _errors(model)
        model.first.weight.grad = randn(8, 8, seed=3 + mesh.data_index)
        model(x, "second").square().sum().backward()
        for old, new in zip(before, _errors(model), strict=True):
            mean = (randn(8, 8, seed=3) + randn(8, 8, seed=4)) / 2
            given, found = mean + old.mean(0), model.first.weight.grad + new.mean(0)
            assert torch.allclose(found, given, rtol=0, atol=1e-12)
        return model.first.weight.grad

    assert torch.equal(*on_ranks((1, 1, 1), body, data=2))


def test_an_assigned_gradient_that_was_cleared_does_not_come_back():
    """Another model's backward pass between both must not take it for one of its own."""
    net, other = initialized(Two()), initialized(nn.Linear(8, 8))

    def body(mesh):
        form = PowerSGD(rank=1, start=0, least_saving=1)
        model = parallelize(copy.deepcopy(net), mesh, gradients=form)
        critic, x = parallelize(copy.deepcopy(other), mesh), randn(2, 8, seed=mesh.data_index)
        model(x, "first").square().sum().backward()
        model.first.weight.grad = randn(8, 8, seed=3)
        critic(x).square().sum().backward()
        model.zero_grad()
        model(x, "second").square().sum().backward()
        return model.first.weight.grad

    assert on_ranks((1, 1, 1), body, data=2) == [None, None]


class Closed(torch.optim.Optimizer):
    """Optimizer without gradients, which gets a loss alone."""

    @torch.no_grad()
    def step(self, closure):
        return closure()


@pytest.mark.parametrize("frozen", [True, False])
def test_losses_of_a_closure_over_models_of_two_meshes(frozen):
    """Also if no parameter has gradients, and the first model has one sample group."""
    net = initialized(nn.Conv3d(4, 4, 1)).requires_grad_(not frozen)

    def rank(world):
        cut, groups = Mesh(world, 1, (2, 1, 1)), Mesh(world, data=2)
        one, two = parallelize(copy.deepcopy(net), cut), parallelize(copy.deepcopy(net), groups)
        optimizer = Closed([*one.parameters(), *two.parameters()], {})
        x = X[world.rank : world.rank + 1]
        return optimizer.step(lambda: one(X).square().mean() + two(x).square().mean())

    expected = 2 * net(X).square().mean().detach()
    for found in run_local(rank, 2):
        torch.testing.assert_close(whole_of(found).detach(), expected, rtol=1e-12, atol=0)


def _errors(model):
    """Returns what PowerSGD has not sent of the first layer, for all groups; on rank 0."""
    entries = gradient_state(model).get("parameters", {})
    return [each["error"].clone() for name, each in entries.items() if "first" in name]
