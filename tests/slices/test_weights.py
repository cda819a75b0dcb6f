"""Sharded weights as users see them: gradients, hooks, vectors, plain inputs, memory."""

from __future__ import annotations

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW
from torch.utils.checkpoint import checkpoint

import pydist
from pydist import ShardedTensor
from pydist.errors import NotSupported, UsageError
from pydist.exchange.own_slice import own_slice
from pydist.gradients.registration import reducer_of
from support.equivalence import assert_same, error, on_ranks, randn, whole_of
from support.networks.sliced import (
    NETWORK,
    backward,
    batch,
    network,
    on_channels,
    parallel,
    weights,
)


@pytest.mark.parametrize("data", [1, 2])
def test_gradients_accumulate_without_reduction(data):
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        if mesh is None:
            backward(model, batch())
        else:
            with model.no_sync():
                backward(model, batch(mesh))
        backward(model, batch(mesh, seed=1))
        backward(model, batch(mesh, seed=2))
        return [whole_of(p.grad).clone() for p in model.parameters()]

    expected = run()
    for found in on_channels(run, data=data):
        assert_same(found, expected)


@pytest.mark.parametrize("change", ["frozen", "converted", "copied", "criterion"])
def test_weights_that_are_trained_later(change):
    """Members that the reducer finds in a backward pass: each slice with its own."""

    def run(mesh=None):
        model = network()
        if change == "frozen":
            model.requires_grad_(False)
        if mesh is not None:
            parallel(mesh, model)
        if change == "frozen":
            model[2](batch_like(mesh))
            model.requires_grad_(True)
        if change == "converted":
            model.float().double()
        if change == "copied":
            model = copy.deepcopy(model)
        optimizer = Adam(model.parameters(), 0.01)
        for step in range(3):
            optimizer.zero_grad()
            y = model(batch(mesh, seed=step))
            target = torch.tanh(model[0].weight).square().sum() if change == "criterion" else 0
            (y.sin().square().mean() + target).backward()
            optimizer.step()
        if change == "converted":  # rounded once
            return [tensor.float() for tensor in weights(model)]
        return weights(model)

    def batch_like(mesh):
        x = randn(4, 8)
        return x if mesh is None else pydist.distribute_tensor(x[:2], mesh, {})

    expected = run()
    for found in on_channels(run, data=2):
        if change == "converted":
            for mine, other in zip(found, expected, strict=True):
                assert error(mine, other) < 1e-6
        else:
            assert_same(found, expected)


def test_gradients_that_autograd_returns_and_penalties_on_them():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        loss = model(batch(mesh)).sin().square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        tensors = [*grads, *(p.grad for p in model.parameters())]
        return [whole_of(tensor) for tensor in tensors]

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_zeroed_gradients_leave_the_graph():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            assert not any(p.grad is not None and p.grad.requires_grad for p in model.parameters())
            model(batch(mesh)).sin().square().mean().backward(create_graph=True)
        found = [whole_of(p.grad).detach().clone() for p in model.parameters()]
        model.zero_grad()  # the graph holds the parameters
        return found

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


def test_recomputation_inference_and_autocast():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        y = checkpoint(model, batch(mesh), use_reentrant=False)
        y.sin().square().mean().backward()
        with torch.inference_mode():
            inferred = whole_of(model(batch(mesh)))
        with torch.autocast("cpu", torch.bfloat16):
            half = whole_of(model.float()(batch(mesh).float())).detach()
        assert half.dtype == torch.bfloat16
        return [inferred.clone(), *(whole_of(p.grad).double() for p in model.parameters())], half

    expected, expected_half = run()
    for found, half in on_channels(run):
        for mine, other in zip(found, expected, strict=True):
            assert error(mine, other) < 1e-6
        assert error(half, expected_half) < 2e-2


def test_parameters_as_a_vector():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters((vector * 0.9).detach(), model.parameters())
        for own in () if mesh is None else map(own_slice, model.parameters()):
            assert own.untyped_storage().nbytes() == own.nbytes
        backward(model, batch(mesh))
        return [whole_of(vector), *weights(model), *(whole_of(p.grad) for p in model.parameters())]

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("computed", [False, True])
def test_fast_weights(data, computed):
    """Weights computed from sharded ones, with gradients over all sample groups."""

    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        fast = dict(model.named_parameters())
        if not computed:
            fast = {n: w.detach().clone().requires_grad_() for n, w in fast.items()}
        for _ in range(3):
            y = torch.func.functional_call(model, fast, (batch(mesh),))
            loss = y.sin().square().mean()
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=computed)
            pairs = zip(fast.items(), grads, strict=True)
            fast = {n: w - 0.5 * g for (n, w), g in pairs}
            if not computed:
                fast = {n: w.detach().requires_grad_() for n, w in fast.items()}
        return [whole_of(each) for each in (*grads, *fast.values())]

    expected = run()
    for found in on_channels(run, data=data):
        assert_same(found, expected)


def test_weights_that_change_between_forward_and_backward():
    """Unknown to autograd: backward uses the present values, as on one device."""

    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        loss = model(batch(mesh)).sin().square().mean()
        for p in model.parameters():
            p.data.mul_(0.9)
        loss.backward()
        return [whole_of(p.grad) for p in model.parameters()]

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


def test_hooks_see_the_mean_in_the_global_shape():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        norms = []

        def halve(grad):
            norms.append(grad.norm().detach())
            return grad / 2

        def after(weight):
            assert weight is model[0].weight
            norms.append(weight.grad.norm().detach())
            assert weight.shape == weight.grad.shape

        handles = [
            model[0].weight.register_hook(halve),
            model[0].weight.register_post_accumulate_grad_hook(after),
        ]
        backward(model, batch(mesh))
        for handle in handles:
            handle.remove()
        grad = model[0].weight.grad
        return [*norms, whole_of(grad)]

    expected = run()
    assert len(expected) == 3
    for found in on_channels(run, data=2):
        assert_same(found, expected)


def test_slices_are_reduced_over_the_ranks_that_hold_them():
    def body(mesh):
        model = parallel(mesh)
        wholes, slices = reducer_of(mesh).members.lanes
        return (
            (wholes.transport.size, sum(leaf.numel for leaf in wholes.leaves)),
            (slices.transport.size, sum(leaf.numel for leaf in slices.leaves)),
            sum(p.numel() for p in model.parameters()),
        )

    found = on_ranks((2, 1, 1), body, axes={"channel": 2}, data=2, shares={"channel": (2, 1)})
    for rank, (wholes, slices, numel) in enumerate(found):
        rows = ((5, 3), (3, 2))[rank // 2 % 2]  # of 8 and of 5 outputs
        assert wholes == (8, 8 + 5)
        assert slices == (4, rows[0] * 6 + rows[1] * 8)
        assert numel == 8 * 6 + 8 + 8 * 5 + 5


def test_memory_of_a_wide_layer():
    """Bytes of weights, gradients and optimizer state: 1/c of the whole on each rank."""

    def of_rank(mesh, sharded):
        torch.manual_seed(0)
        layers = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        model = nn.Sequential(*layers, nn.Linear(64, 256, bias=False))
        pydist.parallelize(model, mesh, sharded_weights=sharded)
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            model(pydist.distribute_tensor(torch.ones(2, 64), mesh, {})).sum().backward()
            optimizer.step()
        found = []
        for parameter in model.parameters():
            moments = (v for v in optimizer.state[parameter].values() if v.dim())
            for tensor in (parameter, parameter.grad, *moments):
                local = tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor
                found.append(local.untyped_storage().nbytes())
        return sum(found)

    whole = 4 * 4 * 3 * 64 * 256  # weight, gradient and two moments of float32
    assert on_channels(partial(of_rank, sharded=False)) == [whole] * 2
    assert on_channels(partial(of_rank, sharded=True)) == [whole // 2] * 2
    assert on_channels(partial(of_rank, sharded=True), channel=4) == [whole // 4] * 4


def test_results_inherit_from_activations():
    """Not from the weight, which belongs to no forward pass: dropout would repeat its masks."""

    def run(mesh):
        layer = nn.Linear(6, 6, bias=False).double()
        with torch.no_grad():
            layer.weight.fill_(1.0)
        model = pydist.parallelize(layer, mesh, sharded_weights=True)
        model.forward = lambda x: F.dropout(layer.weight * (layer.weight @ x), 0.5)
        x = torch.ones(6, 6, dtype=torch.float64)
        made = (model(pydist.distribute_tensor(x, mesh, {})) for _ in range(3))
        return [whole_of(y).detach() for y in made]

    expected = on_ranks((1, 1, 1), run)[0]
    assert error(expected[0], expected[1]) > 0.1
    for found in on_channels(run):
        assert_same(found, expected)


def test_plain_inputs_must_be_equal():
    def body(mesh):
        model = parallel(mesh)
        assert_same(model(batch()), NETWORK(batch()))
        with pytest.raises(UsageError, match=r"plain tensor of shape .* differs between"):
            model(batch(seed=mesh.rank)).sum().backward()  # which compares

    on_channels(body)


def test_a_parameter_that_is_computed_from_a_weight_is_refused():
    """Its slices would be averaged over ranks that have other ones."""

    def body(mesh):
        model = parallel(mesh)
        with pytest.raises(
            NotSupported, match=r"Parameter of a tensor of shape .* sharded weights"
        ):
            model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
        with torch.no_grad():
            model[0].weight *= 0.5
        assert error(weights(model)[0], 0.5 * network()[0].weight.detach()) == 0

    on_channels(body)


def test_a_refused_model_is_as_before():
    def body(mesh):
        model = network()
        last = model[2].weight
        handle = last.register_hook(lambda grad: grad)
        with pytest.raises(NotSupported, match=r"hooks on '2\.weight'"):
            parallel(mesh, model)
        handle.remove()
        held = weakref.ref(last)
        with pytest.raises(NotSupported, match=r"'2\.weight' can't become .* something else holds"):
            parallel(mesh, model)
        assert held() is last
        assert not any(isinstance(p, ShardedTensor) for p in model.parameters())
        del held
        assert_same(parallel(mesh, model)(batch(mesh)), NETWORK(batch()))

    on_channels(body)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_weights_in_shared_memory_are_refused(kind):
    def body(mesh):
        model = network()
        weight = model[2].weight.data
        if kind == "buffer":
            model.register_buffer("last", weight[1:])
        else:
            model.append(nn.Linear(8, 4)).double()
            model[3].weight = nn.Parameter(weight[1:])
        with pytest.raises(NotSupported, match=r"'2\.weight' and '(last|3\.weight)' share memory"):
            parallel(mesh, model)

    on_channels(body)


def test_halves_of_a_matrix_are_cut():
    """They overlap as intervals of memory, but share no element."""

    def body(mesh):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(6, 8)).double()
        for layer, part in zip(model, randn(8, 12).chunk(2, dim=1), strict=True):
            layer.weight = nn.Parameter(part)
        parallel(mesh, model)
        return [isinstance(layer.weight, ShardedTensor) for layer in model]

    assert on_channels(body)[0] == [True, True]


def test_weights_side_by_side_in_memory():
    def body(mesh):
        model = network()
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector, model.parameters())
        assert isinstance(parallel(mesh, model)[0].weight, ShardedTensor)

    on_channels(body)


def test_data_is_no_sharded_weight():
    def body(mesh):
        weight = pydist.distribute_tensor(randn(4, 6), mesh, {0: "channel"})
        with pytest.raises(NotSupported, match="the input is plain and the weight sharded"):
            F.linear(batch(), weight)

    on_channels(body)
