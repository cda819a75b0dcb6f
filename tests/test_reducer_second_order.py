"""Penalties on parameters and gradients: what autograd.grad gives is reduced, differentiably."""

from __future__ import annotations

import pytest
import torch
from networks import SHAPE, small


def test_a_penalty_written_by_hand():
    def use(model, mesh):
        loss = loss_of(model, mesh) + 0.1 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return gradients_of(model)

    check(small, use, data=2, spatial=(2, 2, 1))


def test_a_penalty_alone():
    """No exchange at all in this backward."""

    def use(model, mesh):
        sum(p.square().sum() for p in model.parameters()).backward()
        return gradients_of(model)

    check(small, use, data=2)


def input_of(mesh):
    if mesh is None:
        return randn(*SHAPE).requires_grad_()
    x = pydist.distribute_tensor(randn(*SHAPE)[rows(mesh)], mesh).detach()
    return x.requires_grad_()


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 1)), (1, (8, 1, 1)), (2, (2, 1, 1))])
def test_gradient_penalty_on_the_input(data, spatial):
    """Wasserstein GANs: the norm of the input's gradient is part of the loss."""

    def use(model, mesh):
        x = input_of(mesh)
        (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        norms = gx.square().sum((1, 2, 3, 4)).sqrt()
        (norms - 1).square().mean().backward()
        return gradients_of(model)

    check(small, use, data, spatial)


def test_gradient_penalty_on_a_plain_input():
    def use(model, mesh):
        x = randn(*SHAPE).requires_grad_()
        (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gx.square().sum().backward()
        return [gx, *gradients_of(model)]

    check(small, use, spatial=(2, 2, 1))


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 1)), (1, (8, 1, 1)), (2, (2, 1, 1))])
def test_gradient_penalty_on_the_parameters(data, spatial):
    def use(model, mesh):
        grads = torch.autograd.grad(
            loss_of(model, mesh), list(model.parameters()), create_graph=True
        )
        sum(g.square().sum() for g in grads).backward()
        return [*grads, *gradients_of(model)]

    check(small, use, data, spatial)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph_leaves_differentiable_gradients_of():
    def use(model, mesh):
        loss_of(model, mesh).backward(create_graph=True)
        grads = gradients_of(model)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters()))
        model.zero_grad()
        return [*grads, *second]

    check(small, use, data=2)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_autograd_grad_on_parameters_gives_the_mean(data, spatial):
    def use(model, mesh):
        found = torch.autograd.grad(loss_of(model, mesh), list(model.parameters()))
        assert all(g is None for g in gradients_of(model))
        return found

    check(small, use, data, spatial)


CHOSEN = {
    "first": ["0.weight"],
    "middle": ["4.bias", "4.weight"],
    "last": ["11.bias"],
    "none": [],
}


@pytest.mark.parametrize("names", CHOSEN.values(), ids=CHOSEN)
def test_autograd_grad_on_some_parameters_and_the_input(names):
    def use(model, mesh):
        x = input_of(mesh)
        chosen = [model.get_parameter(name) for name in names]
        gx, *rest = torch.autograd.grad(model(x).square().mean(), [x, *chosen])
        return [gx.full_tensor() if isinstance(gx, ShardedTensor) else gx, *rest]

    check(small, use)


def test_autograd_grad_on_the_input_reduces_no_parameters():
    def body(mesh):
        model, x = parallelize(small(), mesh), input_of(mesh)
        torch.autograd.grad(model(x).sum(), x)
        assert "gradients" not in mesh.timers.snapshot()

    on_ranks((2, 1, 1), body)
