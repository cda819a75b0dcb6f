"""Penalties on parameters and gradients: results of autograd.grad are reduced differentiably."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pydist.gradients.buckets
from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported
from support.equivalence import error, group_slice, layout_at, on_ranks, randn, shard, whole_of
from support.networks.small import BATCH, SHAPE, check_use, gradients_of, loss_of, small


@pytest.fixture(params=[1, 1 << 30], ids=["alone", "together"], autouse=True)
def sizes(request, monkeypatch):
    """Gradients are sent from their own memory, or copied into one message."""
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", request.param)


def test_a_penalty_written_by_hand():
    def use(model, mesh):
        loss = loss_of(model, mesh) + 0.1 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return gradients_of(model)

    check_use(small, use, data=2, spatial=(2, 2, 1))


def test_a_penalty_alone():
    """This backward needs no exchange."""

    def use(model, mesh):
        sum(p.square().sum() for p in model.parameters()).backward()
        return gradients_of(model)

    check_use(small, use, data=2)


GRIDS = [(1, (2, 2, 1)), (1, (8, 1, 1)), (2, (2, 1, 1))]


def input_of(mesh):
    if mesh is None:
        return randn(*SHAPE).requires_grad_()
    x = distribute_tensor(randn(*SHAPE)[group_slice(mesh, BATCH)], mesh).detach()
    return x.requires_grad_()


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_gradient_penalty_on_the_input(data, spatial):
    """In Wasserstein GANs, the norm of the input's gradient is part of the loss."""

    def use(model, mesh):
        x = input_of(mesh)
        (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        norms = gx.square().sum((1, 2, 3, 4)).sqrt()
        (norms - 1).square().mean().backward()
        return gradients_of(model)

    check_use(small, use, data, spatial)


def test_gradient_penalty_on_a_plain_input():
    def use(model, mesh):
        x = randn(*SHAPE).requires_grad_()
        (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gx.square().sum().backward()
        return [gx, *gradients_of(model)]

    check_use(small, use, spatial=(2, 2, 1))


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_gradient_penalty_on_the_parameters(data, spatial):
    def use(model, mesh):
        grads = torch.autograd.grad(
            loss_of(model, mesh), list(model.parameters()), create_graph=True
        )
        sum(g.square().sum() for g in grads).backward()
        return [*grads, *gradients_of(model)]

    check_use(small, use, data, spatial)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_a_gradient_that_meets_shards_again(data, spatial):
    """The gradient with respect to it then differs between the ranks."""

    def use(model, mesh):
        x = input_of(mesh)
        (g,) = torch.autograd.grad(loss_of(model, mesh), model[0].weight, create_graph=True)
        (x * g.sum((1, 2, 3, 4))[:2, None, None, None]).square().mean().backward()
        return gradients_of(model)

    check_use(small, use, data, spatial)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_a_gradient_that_is_used_with_shards_again(data, spatial):
    """As in meta-learning, the loss contains a step, and the new weights see the batch."""

    def use(model, mesh):
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss_of(model, mesh), parameters, create_graph=True)
        stepped = {n: p - 0.1 * g for n, p, g in zip(names, parameters, grads, strict=True)}
        loss_of(lambda x: torch.func.functional_call(model, stepped, (x,)), mesh, 1).backward()
        return gradients_of(model)

    check_use(small, use, data, spatial)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph_leaves_differentiable_gradients():
    def use(model, mesh):
        loss_of(model, mesh).backward(create_graph=True)
        grads = gradients_of(model)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters()))
        model.zero_grad()
        return [*grads, *second]

    check_use(small, use, data=2)


def penalty_on_gradients(model, mesh):
    """Adds to gradients with a graph a rank-local part."""
    loss_of(model, mesh).backward(create_graph=True)
    sum(p.grad.square().sum() for p in model.parameters()).backward()


def an_ordinary_pass_after(model, mesh):
    loss_of(model, mesh).backward(create_graph=True)
    loss_of(model, mesh, 1).backward()


def an_unreduced_part_before(model, mesh):
    with model.no_sync() if mesh else contextlib.nullcontext():
        loss_of(model, mesh, 1).backward()
    loss_of(model, mesh).backward(create_graph=True)


def parts_before_and_after(model, mesh):
    an_unreduced_part_before(model, mesh)
    with model.no_sync() if mesh else contextlib.nullcontext():
        loss_of(model, mesh, 2).backward()
    loss_of(model, mesh, 3).backward(create_graph=True)
    loss_of(model, mesh, 4).backward()


PASSES = [
    penalty_on_gradients,
    an_ordinary_pass_after,
    an_unreduced_part_before,
    parts_before_and_after,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(("data", "spatial"), [*GRIDS, (1, (3, 1, 1))])
@pytest.mark.parametrize("passes", PASSES)
def test_passes_with_and_without_a_graph_accumulate(passes, data, spatial):
    def use(model, mesh):
        passes(model, mesh)
        found = [p.grad.detach() for p in model.parameters()]
        model.zero_grad()
        return found

    check_use(small, use, data, spatial)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_hooks_after_accumulation_see_the_mean_of_a_gradient_with_a_graph(data, spatial):
    """As in torch, the hook's changes are in the graph; they are in no message."""
    seen = []

    def halve(parameter):
        seen.append(torch.is_grad_enabled())
        parameter.grad.mul_(0.5)

    def use(model, mesh):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        loss = loss_of(model, mesh)
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        (loss + penalty).backward()
        found = [p.grad.detach() for p in model.parameters()]
        model.zero_grad()
        return found

    check_use(small, use, data, spatial)
    assert set(seen) == {True, False}


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_autograd_grad_on_parameters_gives_the_mean(data, spatial):
    def use(model, mesh):
        found = torch.autograd.grad(loss_of(model, mesh), list(model.parameters()))
        assert all(g is None for g in gradients_of(model))
        return found

    check_use(small, use, data, spatial)


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
        return [whole_of(gx), *rest]

    check_use(small, use)


class Sometimes(nn.Module):
    """Network with parameters that some forwards leave out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 3, 3, padding=1).double()
        nn.init.constant_(self.conv.weight, 0.1)
        nn.init.constant_(self.conv.bias, 0.2)
        self.scale = nn.Parameter(randn(3, 1, 1, 1, seed=1))
        self.never = nn.Parameter(randn(3, seed=2))

    def forward(self, x, use):
        y = self.conv(x).tanh()
        return (y * self.scale if use else y).square().mean()


@pytest.mark.parametrize("names", [["scale"], ["conv.bias", "scale", "never"]], ids=" ".join)
@pytest.mark.parametrize("outside", [False, True])
def test_autograd_grad_on_a_parameter_that_one_group_alone_uses(names, outside):
    """The other group contributes zero, as in backward."""

    def use(losses, model, factor):
        chosen = [*(model.get_parameter(name) for name in names), factor]
        return torch.autograd.grad(sum(losses) / len(losses), chosen, allow_unused=True)

    def made():
        return Sometimes(), nn.Parameter(randn(1, seed=3))  # the latter in no model

    def loss_of_group(model, factor, index):
        loss = model(randn(2, 2, 4, 4, 4, seed=index), use=index == 0)
        return loss * factor.square().sum() if outside and index == 0 else loss

    model, factor = made()
    expected = use([loss_of_group(model, factor, i) for i in range(2)], model, factor)

    def body(mesh):
        model, factor = made()
        model = parallelize(model, mesh)
        return use([loss_of_group(model, factor, mesh.data_index)], model, factor)

    for found in on_ranks((2, 1, 1), body, data=2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_autograd_grad_where_a_group_uses_nothing_of_the_network():
    def body(mesh):
        model = parallelize(Sometimes(), mesh)
        own, loss = randn(1).requires_grad_(), model(randn(2, 2, 4, 4, 4), use=True)
        loss = loss if mesh.data_index else own.square().sum()
        chosen = [model.conv.weight, model.never]
        return torch.autograd.grad(loss, chosen, allow_unused=True)

    model = Sometimes()
    half = torch.autograd.grad(model(randn(2, 2, 4, 4, 4), use=True), model.conv.weight)[0] / 2
    for found, never in on_ranks((2, 1, 1), body, data=2):
        torch.testing.assert_close(found, half, rtol=1e-12, atol=1e-14)
        assert never is None


def test_a_graph_of_a_gradient_that_one_group_alone_has_is_refused():
    def body(mesh):
        model = parallelize(Sometimes(), mesh)
        loss = model(randn(2, 2, 4, 4, 4), use=mesh.data_index == 0)
        chosen = [model.conv.bias, model.never]
        assert torch.autograd.grad(loss, chosen, create_graph=True, allow_unused=True)[1] is None
        with pytest.raises(NotSupported, match="some sample groups use and others do not"):
            torch.autograd.grad(loss, model.scale, create_graph=True, allow_unused=True)

    on_ranks((1, 1, 1), body, data=2)


def test_hooks_of_a_group_that_does_not_use_a_parameter_see_its_mean():
    def body(mesh):
        model = parallelize(Sometimes(), mesh)
        model.scale.register_hook(lambda grad: grad.clamp(max=0) - 1)
        loss = model(randn(2, 2, 4, 4, 4), use=mesh.data_index == 0)
        return torch.autograd.grad(loss, model.scale, allow_unused=True)[0]

    first, *others = on_ranks((1, 1, 1), body, data=2)
    assert first.max() <= -1
    assert all(torch.equal(other, first) for other in others)


def test_autograd_grad_on_the_input_reduces_no_parameters():
    def body(mesh):
        model, x = parallelize(small(), mesh), input_of(mesh)
        torch.autograd.grad(model(x).sum(), x)
        assert "gradients" not in mesh.session.timers.snapshot()

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_group_without_samples_and_a_gradient_with_other_strides(with_graph):
    def use(weight, x):
        loss = whole_of(x.square().mean((2, 3, 4)) @ weight).square().mean()
        (grad,) = torch.autograd.grad(loss, [weight], create_graph=with_graph)
        return [grad, *(torch.autograd.grad(grad.square().sum(), [weight]) if with_graph else ())]

    def made():
        return nn.Parameter(randn(3, 2, seed=1).t())  # as its gradient, not contiguous

    x = randn(3, 2, 4, 4, 4)
    expected = use(made(), x)
    assert not expected[0].is_contiguous()

    def body(mesh):
        rows = slice(0, 3) if mesh.data_index == 0 else slice(3, 3)
        return use(made(), distribute_tensor(x[rows], mesh))

    for found in on_ranks((1, 1, 1), body, data=2):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_second_order_of_a_block_without_samples():
    """torch's own convolution gives no second derivative there."""
    x, weight = randn(4, 2, 8), randn(3, 2, 3, seed=1)

    def second(x, w):
        first = torch.autograd.grad(F.conv1d(x, w).square().sum(), [x], create_graph=True)
        return torch.autograd.grad(first[0].square().sum(), w)[0]

    expected = second(x.clone().requires_grad_(), nn.Parameter(weight.clone()))

    def body(mesh):
        layout = layout_at(mesh, x.shape, [[0, 0, 4], None, None])
        return second(shard(x, layout).requires_grad_(), nn.Parameter(weight.clone()))

    for found in on_ranks((2, 1, 1), body):
        assert error(found, expected) <= 1e-12
