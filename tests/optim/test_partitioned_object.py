"""Tests of the partitioned optimizer object: schedulers, groups, state dicts, and refusals."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.optim import ShardedOptimizer, gather_gradients, sharded
from pydist.optim.partitioned import WORTHWHILE
from support.equivalence import on_ranks, randn
from support.networks.small import initialized, loss_of, small
from support.training.shared_steps import OPTIMIZERS, adam, check, train

pytestmark = pytest.mark.usefixtures("sizes")


def test_schedulers_made_before_and_after():
    def loop(model, optimizer, mesh, step):
        if step == 0:
            inner = getattr(optimizer, "_inner", optimizer)
            optimizer.schedules = [
                lr_scheduler.LinearLR(inner, 0.1, total_iters=3),
                lr_scheduler.StepLR(optimizer, 2),
            ]
        loss_of(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for schedule in optimizer.schedules:
            schedule.step()

    check(loop=loop)


def test_closures():
    def loop(model, optimizer, mesh, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, mesh, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad

    check(loop=loop)


def test_groups_with_settings_of_their_own_and_one_added_later():
    def make(parameters):
        first, *rest = parameters
        return Adam([{"params": [first], "lr": 1e-3}, {"params": rest[:-1], "weight_decay": 0.1}])

    def loop(model, optimizer, mesh, step):
        if step == 2:
            optimizer.add_param_group({"params": [model[11].bias], "lr": 0.1})
        optimizer.param_groups[0]["lr"] *= 0.5
        loss_of(model, mesh, step).backward()
        optimizer.step()
        model.zero_grad()

    check(make, loop)


def test_a_group_added_between_backward_and_step():
    """Parts move to other ranks while gradients are pending."""

    def make(parameters):
        return Adam(list(parameters)[:5], 1e-2)

    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        if step == 1:
            optimizer.add_param_group({"params": list(model.parameters())[5:]})
        optimizer.step()
        model.zero_grad()

    check(make, loop)


def test_a_group_of_parameters_outside_of_the_model():
    def steps(optimizer, outside):
        for _ in range(3):
            (outside - 3).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return outside.detach(), optimizer.state_dict()["state"]

    def made():
        return nn.Parameter(torch.ones(3, dtype=torch.float64))

    def body(mesh):
        model, outside = parallelize(small(), mesh), made()
        optimizer = sharded(adam(model.parameters()), model, "always")
        optimizer.add_param_group({"params": [outside]})
        return steps(optimizer, outside)

    outside = made()
    expected, state = steps(adam([outside]), outside)
    for found, states in on_ranks((2, 1, 1), body):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(list(states.values()), list(state.values()))


def test_a_group_of_a_layer_that_was_frozen_and_gets_its_gradients_by_hand():
    def body(mesh, use):
        model = small()
        model[0].requires_grad_(False)
        model = parallelize(model, mesh)
        optimizer = sharded(adam(list(model.parameters())[2:]), model, use)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        for step in range(3):
            parameters = list(model.parameters())
            found = torch.autograd.grad(loss_of(model, mesh, step), parameters)
            for parameter, grad in zip(parameters, found, strict=True):
                parameter.grad = grad
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    expected, *_ = on_ranks((2, 1, 1), lambda mesh: body(mesh, "never"))
    for found in on_ranks((2, 1, 1), lambda mesh: body(mesh, "always")):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_refused_group_is_not_added():
    def body(mesh):
        model = parallelize(small(), mesh)
        *rest, last = model.parameters()
        optimizer = sharded(adam(rest), model, "always")
        handle = last.register_hook(lambda grad: grad)
        with pytest.raises(NotSupported, match="hooks on the parameter"):
            optimizer.add_param_group({"params": [last]})
        assert len(optimizer.param_groups) == 1
        handle.remove()
        optimizer.add_param_group({"params": [last]})
        loss_of(model, mesh, 0).backward()
        before = last.detach().clone()
        optimizer.step()
        assert not torch.equal(last, before)

    on_ranks((2, 1, 1), body)


def test_hooks_see_the_whole():
    def loop(model, optimizer, mesh, step):
        if step == 0:
            optimizer.register_step_pre_hook(
                lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None
            )
        loss_of(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop, make=lambda p: SGD(p, 0.5))


class Halved(Adam):
    """Steps by half of the gradients; says that it is Adam's step, as decorators do."""

    elementwise = True

    @functools.wraps(Adam.step)
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.mul_(0.5).clamp_(-1e-3, 1e-3)
        return super().step(closure)


def replaced(parameters):
    optimizer = SGD(parameters, 0.1)
    step = optimizer.step

    def clamped(closure=None):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.clamp_(-1e-3, 1e-3)
        return step(closure)

    optimizer.step = clamped
    return optimizer


class Counting(SGD):
    """Divides the rate by the number of steps, counted in the group, an attribute and the state."""

    elementwise = True
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        count = self.state["run"]
        count["steps"] = count.get("steps", 0) + 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            assert group["steps"] == count["steps"] == self.steps
            group["lr"] = 0.5 / group["steps"]
        return super().step(closure)


@pytest.mark.parametrize("ranks", [2, 3])
def test_optimizers_that_count_their_steps(ranks):
    """They step once for all buckets, also on a rank without a part."""

    def make(parameters):
        first, *rest = parameters
        return Counting([{"params": [first]}, {"params": rest}], 0.5, momentum=0.9)

    def body(mesh):
        model = initialized(nn.Sequential(nn.Linear(8, 1), nn.Tanh(), nn.Linear(1, 9)).double())
        model = parallelize(model, mesh)
        optimizer = sharded(make(model.parameters()), model, "always")
        for step in range(5):
            model(randn(3, 8, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert optimizer.state_dict()["state"]["run"] == {"steps": 5}
        assert [group["steps"] for group in optimizer.param_groups] == [5, 5]

    on_ranks((1, 1, 1), body, data=ranks)
    check(make)


@pytest.mark.parametrize("make", [lambda p: Halved(p, 0.1), replaced])
def test_steps_of_users_are_called(make):
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(make, loop)


def test_hooks_of_all_optimizers_see_the_whole_once():
    calls = []

    def clip(optimizer, *_):
        calls.append(optimizer)
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.01)

    handle = register_optimizer_step_pre_hook(clip)
    try:
        check(make=lambda p: SGD(p, 0.5))
        calls.clear()
        on_ranks((2, 1, 1), lambda mesh: train(mesh, "always", steps=3)[1] and None)
    finally:
        handle.remove()
    assert len(calls) == 2 * 3


def test_parameters_frozen_and_unfrozen():
    """Parts move to other ranks together with their state."""

    def loop(model, optimizer, mesh, step):
        model[0].requires_grad_(step not in (1, 2))
        loss_of(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop)


def test_layers_that_are_unfrozen_one_after_the_other():
    """Each joins those before it, in buckets with other parts."""

    def network():
        return nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)
        ).double()

    def loop(model, optimizer, mesh, step):
        model[2].requires_grad_(step >= 5)
        model[0].requires_grad_(step >= 10)
        for part in range(2):
            model(randn(3, 6, seed=2 * step + part) + mesh.data_index).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(mesh, use):
        model, _ = train(mesh, use, loop=loop, model=initialized(network()), steps=14)
        return [p.detach() for p in model.parameters()]

    expected, *_ = on_ranks((1, 1, 1), lambda mesh: body(mesh, "never"), data=2)
    for found in on_ranks((1, 1, 1), lambda mesh: body(mesh, "always"), data=2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_parameters_outside_of_the_model_and_odd_ones():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = small()
            self.scalar = nn.Parameter(randn(1, seed=1)[0])
            self.gaps = nn.Parameter(randn(3, 8, seed=2)[:, ::2])
            self.turned = nn.Parameter(randn(3, 4, 5, seed=3).transpose(0, 2))
            self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
            self.narrow = nn.Parameter(randn(7, seed=4).float())

        def forward(self, x):
            y = self.trunk(x) * self.scalar + self.gaps.sum(1) + self.narrow.double().sum()
            return y + (self.turned * randn(5, 4, 3)).sum((0, 1)) + self.empty.sum()

    def make(parameters):
        return Adam([*parameters, torch.ones((), dtype=torch.float64, requires_grad=True)], 1e-2)

    def loop(model, optimizer, mesh, step):
        outside = optimizer.param_groups[0]["params"][-1]
        (loss_of(model, mesh, step) * outside).backward()
        assert outside.grad is not None
        outside.grad.fill_(0.1)  # not in the model, so not reduced
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())

    check(make, loop, Odd)


def test_weights_in_channels_last_and_a_model_that_moves():
    def network():
        model = small()
        for layer in (model[0], model[4]):
            layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last_3d)
        return model

    def loop(model, optimizer, mesh, step):
        if step == 2:
            for p in model.parameters():
                p.data = p.data.clone()
        loss_of(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop, network=network)


def test_values_kept_for_backward_are_protected():
    def body(mesh):
        model, optimizer = train(mesh, "always", steps=1)
        kept = sum(p.square().sum() for p in model.parameters())
        loss_of(model, mesh).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()

    on_ranks((2, 1, 1), body)


class TwoHeads(nn.Module):
    """Network with a trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv3d(4, 4, 3, padding=1)
        self.first, self.second = nn.Conv3d(4, 2, 1), nn.Conv3d(4, 2, 1)

    def forward(self, x):
        features = self.trunk(x)
        return self.first(features), self.second(features)


def test_two_optimizers_with_a_backward_between_their_steps():
    """The step of one optimizer keeps the tensors that the other's backward needs."""
    torch.manual_seed(0)
    start, x = TwoHeads().double(), randn(2, 4, 8, 4, 4)

    def trained(model, x, wrap):
        one = wrap(SGD(model.first.parameters(), 0.1))
        two = wrap(SGD([*model.trunk.parameters(), *model.second.parameters()], 0.1))
        a, b = model(x)
        a.square().mean().backward(retain_graph=True)
        one.step()
        b.square().mean().backward()
        two.step()
        return [p.detach() for p in model.parameters()]

    def body(mesh):
        model = parallelize(copy.deepcopy(start), mesh)
        part = distribute_tensor(x, mesh)
        return trained(model, part, lambda o: sharded(o, model, "always"))

    expected = trained(copy.deepcopy(start), x, lambda o: o)
    for found in on_ranks((2, 1, 1), body):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_a_step_that_fails_leaves_equal_parameters():
    def body(mesh):
        model, optimizer = train(mesh, "always", steps=1)
        optimizer.param_groups[-1]["lr"] = "fast"
        loss_of(model, mesh).backward()
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            optimizer.step()
        values = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[-1]["lr"] = 1e-3
        optimizer.zero_grad()
        loss_of(model, mesh).backward()
        optimizer.step()
        return values

    first, *others = on_ranks((2, 1, 1), body)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


# -- state dicts ----------------------------------------------------------------------------


def assert_same_state(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(
                found["state"][index][name], value, rtol=1e-12, atol=1e-13, msg=f"{index}.{name}"
            )


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_dicts_are_those_of_the_plain_optimizer(make):
    def body(mesh):
        _, optimizer = train(mesh, "always", make, steps=3)
        _, plain = train(mesh, "never", make, steps=3)
        assert_same_state(optimizer.state_dict(), plain.state_dict())

    on_ranks((2, 1, 1), body, data=2)


@pytest.mark.parametrize("name", ["adam", "adagrad", "momentum"])
def test_training_goes_on_with_another_number_of_ranks(name):
    make = OPTIMIZERS[name]

    def through(mesh):
        return [p.detach() for p in train(mesh, "always", make, steps=4)[0].parameters()]

    def begin(mesh):
        model, optimizer = train(mesh, "always", make, steps=2)
        return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))

    saved = on_ranks((2, 1, 1), begin, data=2)[3]

    def go_on(mesh, use):
        model = parallelize(small(), mesh)
        model.load_state_dict(saved[0])
        optimizer = sharded(make(model.parameters()), model, use)
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch keeps its counts of steps
        for step in (2, 3):
            loss_of(model, mesh, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    expected = on_ranks((2, 1, 1), through, data=2)[0]
    for grid, use in (((2, 1, 1), "always"), ((1, 2, 2), "always"), ((1, 1, 1), "never")):
        for found in on_ranks(grid, lambda mesh, use=use: go_on(mesh, use)):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_an_optimizer_that_has_stepped_already_is_taken_over():
    def body(mesh):
        model, plain = train(mesh, "never", steps=2)
        expected = copy.deepcopy(plain.state_dict())
        optimizer = sharded(plain, model, "always")
        assert_same_state(optimizer.state_dict(), expected)

    on_ranks((2, 1, 1), body)


# -- which optimizers, and when -------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "LBFGS can't be partitioned: it may look at more than one"),
        (type("Mine", (Adam,), {}), "Mine can't be partitioned"),
        (lambda p: Adam(p, differentiable=True), "differentiable=True"),
    ],
)
def test_optimizers_that_need_wholes_are_refused(make, message):
    def body(mesh):
        model = parallelize(small(), mesh)
        optimizer = make(model.parameters())
        with pytest.raises(UsageError, match=message):
            sharded(optimizer, model, "always")
        assert sharded(optimizer, model) is optimizer

    on_ranks((2, 1, 1), body)


def test_copies_are_refused():
    def body(mesh):
        _, optimizer = train(mesh, "always", steps=1)
        with pytest.raises(NotSupported, match=r"use state_dict\(\)"):
            copy.deepcopy(optimizer)

    on_ranks((2, 1, 1), body)


def test_hooks_that_would_see_parts_are_refused():
    def body(mesh):
        model = parallelize(small(), mesh)
        optimizer = adam(model.parameters())
        optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(UsageError, match=r"register them on what pydist.optim.sharded returns"):
            sharded(optimizer, model, "always")

    on_ranks((2, 1, 1), body)


def test_a_plain_model_and_a_wrong_word_are_named():
    model = small()
    with pytest.raises(UsageError, match="Sequential is not parallelized: call pydist"):
        sharded(adam(model.parameters()), model)

    def body(mesh):
        model = parallelize(small(), mesh)
        with pytest.raises(UsageError, match="use='yes'; possible are auto, always, never"):
            sharded(adam(model.parameters()), model, "yes")

    on_ranks((1, 1, 1), body)


def test_auto_shares_large_networks_among_ranks():
    def body(mesh):
        width = int(WORTHWHILE**0.5)
        large = parallelize(nn.Linear(width, width), mesh)
        less = parallelize(nn.Linear(width, width // 2), mesh)
        return [
            isinstance(sharded(adam(model.parameters()), model), ShardedOptimizer)
            for model in (large, less)
        ]

    assert on_ranks((2, 1, 1), body) == [[True, False]] * 2
    assert on_ranks((1, 1, 1), body) == [[False, False]]


def test_one_rank_needs_no_gathering():
    def body(mesh):
        model, optimizer = train(mesh, "always", steps=1)
        assert type(optimizer) is Adam
        loss_of(model, mesh).backward()
        expected = model[0].weight.grad.clone()
        gather_gradients(model)
        assert torch.equal(model[0].weight.grad, expected)

    on_ranks((1, 1, 1), body)
