"""Random numbers in checkpointed functions: equal to those of forward, or refused by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, distribute_tensor, parallelize, run_local
from pydist.errors import NotSupported
from support.equivalence import on_ranks, randn


def block(x):
    return F.dropout(x.sin(), 0.5)


class Net(nn.Module):
    """Network with a random part, in a function or a method, checkpointed or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 2, 1)
        self.drop = nn.Dropout(0.5)
        self.checkpointed, self.part = False, block

    def forward(self, x):
        y = self.first(x)
        y = checkpoint(self.part, y, use_reentrant=False) if self.checkpointed else self.part(y)
        return self.last(y)

    def method(self, x):
        return F.dropout(x.sin(), 0.5)

    def step(self, x):
        self(x).square().mean().backward()


def gradients(made, part, checkpointed, outside, method, mesh):
    model = copy.deepcopy(made)
    model.checkpointed = checkpointed
    if isinstance(part, str):
        object.__setattr__(model, "part", getattr(model, part))
    parallelize(model, mesh)
    x = distribute_tensor(randn(4, 2, 6, 5, 4), mesh)
    if method:
        model.step(x)
    else:
        y = model(x)
        (F.dropout(y, 0.2) if outside else y).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize(("outside", "method"), [(False, False), (True, False), (False, True)])
def test_a_function_that_draws_is_refused_where_it_is_checkpointed(made, outside, method, spatial):
    def body(mesh):
        gradients(made, block, False, outside, method, mesh)
        with pytest.raises(NotSupported, match="under activation checkpointing in no module's"):
            gradients(made, block, True, outside, method, mesh)

    on_ranks(spatial, body)


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("part", ["method", "drop"])
@pytest.mark.parametrize(("outside", "method"), [(False, False), (True, False), (False, True)])
def test_methods_and_layers_draw_the_same_again(made, part, outside, method, spatial):
    def on_mesh(checkpointed):
        use = (part, checkpointed, outside, method)
        return on_ranks(spatial, lambda mesh: gradients(made, *use, mesh))[0]

    for a, b in zip(on_mesh(True), on_mesh(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Checkpointed:
    """Steps of a network as a whole, with or without a checkpoint around it."""

    def __init__(self, made, checkpointed, mesh) -> None:
        self.model = copy.deepcopy(made)
        self.model.part = self.model.drop
        parallelize(self.model, mesh)
        self.checkpointed, self.mesh = checkpointed, mesh

    def batch(self, seed):
        x = randn(4, 2, 6, 5, 4, seed=seed).tensor_split(self.mesh.data_size)[self.mesh.data_index]
        return distribute_tensor(x, self.mesh)

    def output(self, x):
        if self.checkpointed:
            return checkpoint(self.model, x, use_reentrant=False)
        return self.model(x)

    def loss(self, seed):
        return self.output(self.batch(seed)).square().mean()

    def backward(self, *seeds):
        sum(map(self.loss, seeds)).backward()

    def gradients(self):
        return [p.grad for p in self.model.parameters()]


def in_several_steps(net):
    """Steps with a pass of evaluation, and one without gradients, between."""
    net.backward(0)
    with torch.no_grad():
        net.model(net.batch(0))
    net.backward(1)
    net.model.eval()
    net.loss(2)
    net.model.train()
    net.backward(2)


def accumulated(net):
    with net.model.no_sync():
        net.backward(0)
        net.backward(1)
    net.backward(2)


def two_passes_and_one_backward(net):
    net.backward(0, 1)


def another_pass_between_two_backward_passes(net):
    first = net.loss(0)
    first.backward(retain_graph=True)
    second = net.loss(1)
    first.backward()
    second.backward()


def a_pass_that_is_left(net):
    net.loss(0)
    net.backward(1)


def steps_without_a_checkpoint_between(net):
    net.backward(0)
    before, net.checkpointed = net.checkpointed, False
    net.backward(1)
    net.checkpointed = before
    net.backward(2)


def a_penalty_of_gradients(net):
    x = net.batch(0).requires_grad_()
    (grad,) = torch.autograd.grad(net.output(x).square().sum(), x, create_graph=True)
    (grad.square().mean() + net.loss(1)).backward()


def twice_through_one_pass(net):
    loss = net.loss(0)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("grid", [(1, (1, 1, 1)), (1, (2, 1, 1)), (2, (1, 2, 1))], ids=str)
@pytest.mark.parametrize(
    "steps",
    [
        in_several_steps, accumulated, twice_through_one_pass, two_passes_and_one_backward,
        another_pass_between_two_backward_passes, a_pass_that_is_left,
        steps_without_a_checkpoint_between, a_penalty_of_gradients,
    ],
)  # fmt: skip
def test_a_checkpoint_around_the_whole_model_draws_the_same_again(made, steps, grid):
    data, spatial = grid

    def on_mesh(checkpointed):
        def body(world):
            net = Checkpointed(made, checkpointed, Mesh(world, data, spatial))
            steps(net)
            return net.gradients()

        return run_local(body, data * math.prod(spatial))[0]

    for a, b in zip(on_mesh(True), on_mesh(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_around_several_passes_is_refused(made):
    """Which of them is repeated is not known: the repetition may end within the region."""

    def body(mesh):
        model = Checkpointed(made, False, mesh).model
        x = distribute_tensor(randn(4, 2, 6, 5, 4), mesh)
        y = checkpoint(lambda x: model(x) + model(x * 2), x, use_reentrant=False)
        with pytest.raises(NotSupported, match="a checkpoint repeats, but not once as a whole"):
            y.square().mean().backward()

    on_ranks((2, 1, 1), body)
