"""Plain tensors in place of parameters: they also get the gradients of the full batch."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from pydist import distribute_tensor, parallelize
from pydist.errors import UsageError
from support.equivalence import on_ranks, randn, whole_of
from support.equivalence.groups import inputs, on_groups

RATE = 0.3


class Net(nn.Module):
    """Network whose scale meets sharded tensors elementwise, with a head on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1, 1))
        self.last = nn.Conv3d(4, 3, 3, padding=1, stride=2)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        y = self.last(F.silu(self.norm(self.conv(x))) * self.scale)
        return self.head(whole_of(y.mean((2, 3, 4))))


def network() -> Net:
    torch.manual_seed(0)
    return Net().double()


def loss_of(model, weights, x):
    return functional_call(model, weights, (x,)).square().mean()


def computed(weights, grads):
    """Returns weights after a step that the outer gradient passes through."""
    return {n: w - RATE * g for (n, w), g in zip(weights.items(), grads, strict=True)}


def detached(weights, grads):
    """Returns weights after a step, as leaf copies."""
    return {n: w.detach().requires_grad_() for n, w in computed(weights, grads).items()}


def gradients(loss, weights, create_graph):
    return torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("after", [computed, detached])
def test_fast_weights(after, spatial, sizes):
    def step(model, rows, mesh):
        x = inputs(sum(sizes))[rows]
        weights = dict(model.named_parameters())
        for _ in range(3):
            grads = gradients(loss_of(model, weights, x), weights, after is computed)
            weights = after(weights, grads)
        if after is computed:
            loss_of(model, weights, x).backward()
            return {n: p.grad for n, p in model.named_parameters()}
        return {n: w.detach() for n, w in weights.items()}

    on_groups(network, step, sizes, spatial)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=str)
def test_backward_of_copies(sizes):
    """The gradients are read from `.grad`, including after two accumulating passes."""

    def step(model, rows, mesh):
        x = inputs(sum(sizes))[rows]
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        for scale in (1.0, 2.0):
            (scale * loss_of(model, weights, x)).backward()
        return {n: w.grad for n, w in weights.items()}

    on_groups(network, step, sizes, (2, 1, 1))


@pytest.mark.parametrize("into", ["returned", "grad"])
def test_weights_of_a_function(into):
    """The network has no modules: its weights are in a list, and one is computed."""
    weights = [randn(4, 2, 3, 3, 3, seed=1), randn(4, seed=2), randn(3, 4, 1, 1, 1, seed=3)]

    def step(model, rows, mesh):
        x = inputs(4)[rows]
        if mesh is not None:
            x = distribute_tensor(x, mesh)
        first, bias, last = (w.clone().requires_grad_() for w in weights)
        last = last.sin() * model.scale.mean()
        y = F.conv3d(F.silu(F.conv3d(x, first, bias, padding=1)), last)
        loss, asked = y.square().mean(), [first, bias, last]
        if into == "returned":
            grads = torch.autograd.grad(loss, asked)
        else:
            loss.backward(inputs=asked)
            grads = [w.grad for w in asked]
        return {str(i): g for i, g in enumerate(grads)}

    on_groups(network, step, (3, 1), (2, 1, 1))


def test_parts_called_by_themselves():
    def step(model, rows, mesh):
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.conv.named_parameters()}
        x = inputs(4)[rows]
        y = functional_call(model.conv, weights, x if mesh is None else distribute_tensor(x, mesh))
        y.square().mean().backward()
        return {n: w.grad for n, w in weights.items()}

    on_groups(network, step, (3, 1), (2, 1, 1))


def test_saving_and_copying():
    """pydist's notes on plain tensors are not saved or copied with them."""

    def body(mesh):
        model = parallelize(network(), mesh)
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        noise = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        (loss_of(model, weights, inputs(1) + noise)).backward()
        kept = [*weights.values(), noise]
        file = io.BytesIO()
        torch.save(kept, file)
        file.seek(0)
        for saved, copied, tensor in zip(torch.load(file), copy.deepcopy(kept), kept, strict=True):
            assert torch.equal(saved, tensor)
            assert torch.equal(copied, tensor)

    on_ranks((2, 1, 1), body, 2)


def test_penalty_on_gradients_of_copies():
    def step(model, rows, mesh):
        x = inputs(4)[rows]
        weights = {n: p.sin() for n, p in model.named_parameters()}
        loss = loss_of(model, weights, x)
        grads = gradients(loss, weights, True)
        (loss + sum(g.square().sum() for g in grads)).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    on_groups(network, step, (3, 1), (2, 1, 1))


def test_undefined_gradients_stay_undefined():
    """A convolution is linear in its weight, so dL/dweight does not depend on the weight."""

    def body(mesh):
        weight = randn(3, 2, 3, 3, 3).requires_grad_()
        x = distribute_tensor(randn(1, 2, 4, 4, 4), mesh)
        loss = torch.conv3d(x, weight, padding=1).sum()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(grad.sum(), weight, allow_unused=True)

    for spatial, data in (((1, 1, 1), 2), ((2, 1, 1), 1)):
        assert on_ranks(spatial, body, data) == [(None,)] * 2


@pytest.mark.parametrize("leaf", [True, False])
def test_weights_of_one_group_are_named(leaf):
    def body(mesh):
        model = parallelize(network(), mesh)
        weights = {n: p.detach() + mesh.data_index for n, p in model.named_parameters()}
        weights = {n: w.requires_grad_() for n, w in weights.items()}
        if not leaf:
            weights = {n: w * 2 for n, w in weights.items()}
        loss = loss_of(model, weights, inputs(2)[mesh.data_index :][:1])
        with pytest.raises(UsageError, match="differs between the sample groups"):
            gradients(loss, weights, False)

    on_ranks((1, 1, 1), body, 2)


def test_inputs_stay_those_of_their_group():
    """Inputs of a network, such as optimized noise, are not weights."""

    made = network()

    def step(model, rows, mesh):
        noise = torch.zeros(4, 2, 6, 5, 4, dtype=torch.float64)[rows].requires_grad_()
        loss = model(inputs(4)[rows] + noise).square().sum()
        (grad,) = torch.autograd.grad(loss, noise)
        return grad

    def body(mesh):
        rows = slice(2 * mesh.data_index, 2 * mesh.data_index + 2)
        return step(parallelize(copy.deepcopy(made), mesh), rows, mesh)

    whole = step(made, slice(None), None)
    for rank, found in enumerate(on_ranks((1, 1, 1), body, 2)):
        torch.testing.assert_close(found, whole[2 * rank : 2 * rank + 2])
