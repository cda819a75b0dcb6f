"""Optimizers of sharded weights: torch's own step on slices, with the whole state outside."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pydist import ShardedTensor
from pydist.errors import NotSupported
from pydist.optim import LAMB, LARS, sharded
from pydist.slices.steps import ELEMENTWISE
from support.equivalence import assert_same, error, whole_of
from support.networks.sliced import (
    backward,
    batch,
    network,
    on_channels,
    parallel,
    weights,
)

OPTIMIZERS = {
    **{each.__name__: each for each in ELEMENTWISE},
    "momentum": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "amsgrad": partial(Adam, amsgrad=True, maximize=True),
    **{f"{each.__name__} foreach": partial(each, foreach=True) for each in ELEMENTWISE},
    **{f"{each.__name__} fused": partial(each, fused=True) for each in (SGD, Adagrad, Adam, AdamW)},
    "LARS": partial(LARS, weight_decay=0.1, trust_coefficient=1.0),
    "LAMB": LAMB,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_one_device(make):
    def run(model, x):
        optimizer = make(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            backward(model, x)
            optimizer.step()
        values = optimizer.state_dict()["state"].values()
        tensors = [v for each in values for v in each.values() if isinstance(v, torch.Tensor)]
        return [*weights(model), *tensors]

    def split(mesh):
        return run(parallel(mesh), batch(mesh))

    expected = run(network(), batch())
    for found in on_channels(split, shares={"channel": (2, 1)}):
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert error(mine, other) < 1e-11


def clip(optimizer, *_):
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.01)


def normalize(optimizer, *_):
    with torch.no_grad():
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.mul_(0.5 / p.norm())


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("partitioned", [False, True])
def test_hooks_of_all_optimizers_see_weights(partitioned, first):
    def run(model, x, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()
        return weights(model)

    def split(mesh):
        model = parallel(mesh)
        optimizer = AdamW(model.parameters(), 0.1)
        if partitioned:
            optimizer = sharded(optimizer, model, "always")
        return run(model, batch(mesh), optimizer)

    handles = [register_optimizer_step_pre_hook(clip), register_optimizer_step_post_hook(normalize)]
    try:
        for handle in handles if first else ():
            handle.hooks_dict_ref().move_to_end(handle.id, last=False)
        model = network()
        expected = run(model, batch(), AdamW(model.parameters(), 0.1))
        found = on_channels(split)
        found += on_channels(split, data=2)
    finally:
        for handle in handles:
            handle.remove()
    for each in found:
        assert_same(each, expected)


def test_hooks_of_an_optimizer_see_weights_whenever_they_are_registered():
    def run(model, x):
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            if step == 0:
                before = optimizer.register_step_pre_hook(clip)
            if step == 1:
                optimizer.register_step_post_hook(normalize)
            if step == 2:
                before.remove()
                optimizer.register_step_pre_hook(clip)
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()
        return weights(model)

    expected = run(network(), batch())
    for found in on_channels(lambda mesh: run(parallel(mesh), batch(mesh))):
        assert_same(found, expected)


@pytest.mark.parametrize("make", [SGD, Adam])
def test_gradients_that_were_put_in_a_row_and_taken_apart(make):
    """As methods for several tasks do; the parts of biases are cut as the row is."""

    def run(model, x):
        backward(model, x)
        row, start = torch.cat([p.grad.flatten() for p in model.parameters()]), 0
        for p in model.parameters():
            p.grad = (row[start : start + p.numel()] * 0.5).view_as(p)
            start += p.numel()
        make(model.parameters(), 0.01).step()
        return weights(model)

    expected = run(network(), batch())
    for found in on_channels(lambda mesh: run(parallel(mesh), batch(mesh))):
        assert_same(found, expected)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_that_was_made_before(steps_before):
    def run(mesh=None):
        model = network()
        model[0].weight.name_of_mine = "first"
        optimizer = Adam(model.parameters(), 0.01)
        given = list(model.parameters())
        for _ in range(steps_before):
            optimizer.zero_grad()
            backward(model, batch())
            optimizer.step()
        if mesh is not None:
            backward(model, batch())  # a gradient from before
            optimizer.zero_grad()
            backward(model, batch())
            parallel(mesh, model)
            assert isinstance(model[0].weight, ShardedTensor)
            assert model[0].weight.name_of_mine == "first"
            assert all(a is b for a, b in zip(given, model.parameters(), strict=True))
            assert all(isinstance(p, nn.Parameter) for p in given)
            assert error(given[0].grad.full_tensor(), gradient) == 0
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, batch(mesh))
            optimizer.step()
        return weights(model)

    reference = network()
    optimizer = Adam(reference.parameters(), 0.01)
    for _ in range(steps_before):
        optimizer.zero_grad()
        backward(reference, batch())
        optimizer.step()
    optimizer.zero_grad()
    backward(reference, batch())
    gradient = reference[0].weight.grad
    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


def test_a_closure_sees_sharded_weights():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)

        def closure():
            optimizer.zero_grad()
            loss = model(batch(mesh)).sin().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
            assert model[0].weight.shape == optimizer.param_groups[0]["params"][0].shape
            return loss.detach()

        losses = [optimizer.step(closure), optimizer.step(closure=closure)]
        return [*losses, *weights(model)]

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


def test_a_step_that_raised_is_followed_by_others():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        backward(model, batch(mesh))
        optimizer.step()

        def closure():
            backward(model, batch(mesh, seed=1))
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            optimizer.step(closure)
        optimizer.zero_grad()
        backward(model, batch(mesh))
        optimizer.step()
        state = optimizer.state_dict()["state"]
        return [*weights(model), *(values["momentum_buffer"] for values in state.values())]

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


def test_state_is_loaded_after_a_step_that_raised():
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        backward(model, batch(mesh))
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())

        def closure():
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            optimizer.step(closure)
        optimizer.load_state_dict(saved)
        optimizer.step()
        state = optimizer.state_dict()["state"]
        return [*weights(model), *(values["momentum_buffer"] for values in state.values())]

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


def test_state_is_sharded_and_shows_the_global_shape():
    def body(mesh):
        model = parallel(mesh)
        optimizer = Adam(model.parameters())
        backward(model, batch(mesh))
        optimizer.step()
        moments = optimizer.state[model[0].weight]["exp_avg"]
        return moments.shape, moments.to_local().shape, float(moments.square().sum())

    reference = network()
    optimizer = Adam(reference.parameters())
    backward(reference, batch())
    optimizer.step()
    total = float(optimizer.state[reference[0].weight]["exp_avg"].square().sum())
    for shape, own, found in on_channels(body):
        assert (shape, own) == ((8, 6), (4, 6))
        assert found == pytest.approx(total, rel=1e-12)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    def body(mesh):
        model = parallel(mesh)
        before = weights(model)
        optimizer = Adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(batch(mesh)).square().mean()).backward()
        if mesh.rank == 1:
            model[0].weight.to_local().grad.fill_(torch.inf)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert_same(weights(model), before)
        optimizer.zero_grad()
        scaler.scale(model(batch(mesh)).square().mean()).backward()
        scaler.unscale_(optimizer)
        gradient = model[0].weight.grad.full_tensor()
        scaler.step(optimizer)
        scaler.update()
        assert error(weights(model)[0], before[0]) > 0
        return scaler.get_scale(), gradient

    reference = network()
    reference(batch()).square().mean().backward()
    for scale, gradient in on_channels(body):
        assert scale == 4.0
        assert_same(gradient, reference[0].weight.grad)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping(foreach, norm_type):
    def run(mesh=None):
        model = network() if mesh is None else parallel(mesh)
        backward(model, batch(mesh))
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.02, norm_type, foreach=foreach)
        return [norm, *(whole_of(p.grad) for p in model.parameters())]

    expected = run()
    for found in on_channels(run):
        assert_same(found, expected)


@pytest.mark.parametrize(
    "register",
    [
        nn.utils.parametrizations.weight_norm,
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh()),
    ],
)
def test_parametrizations_come_before_parallelize(register):
    def body(mesh):
        model = parallel(mesh)
        with pytest.raises(NotSupported, match=r"test_steps.*before pydist\.parallelize"):
            register(model[0])

    on_channels(body)


def test_what_can_not_be_stepped_is_refused():
    def body(mesh):
        model = parallel(mesh)
        backward(model, batch(mesh))

        def refused(optimizer, why):
            with pytest.raises(NotSupported, match=why):
                optimizer.step()

        refused(partial_lbfgs(model), "LBFGS with sharded weights: it may look at more than one")
        refused(Adam(model.parameters(), foreach=False, differentiable=True), "differentiable")
        optimizer = SGD(model.parameters(), 0.1)
        with model.no_sync():
            backward(model, batch(mesh))
        refused(optimizer, r"'0.weight'|'0.bias'|'2")

    def partial_lbfgs(model):
        optimizer = torch.optim.LBFGS(model.parameters())
        step = optimizer.step
        optimizer.step = lambda: step(lambda: model)
        return optimizer

    on_channels(body)


class Scaled(torch.optim.Optimizer):
    """Optimizer whose step has an argument that is no closure."""

    elementwise = True

    @torch.no_grad()
    def step(self, scale):
        for p in self.param_groups[0]["params"]:
            p.sub_(scale * p.grad)


class Called(Scaled):
    """Optimizer that gives its closure an argument."""

    def step(self, closure):
        with torch.enable_grad():
            scale = closure(0.5)
        super().step(scale)


@pytest.mark.parametrize("kind", [Scaled, Called])
def test_steps_with_other_arguments(kind):
    def run(model, x):
        optimizer = kind(model.parameters(), {})

        def scale(given):
            backward(model, x)
            return given

        optimizer.step(scale(0.5) if kind is Scaled else scale)
        return weights(model)

    expected = run(network(), batch())
    for found in on_channels(lambda mesh: run(parallel(mesh), batch(mesh))):
        assert_same(found, expected)
