"""Tests of steps in stages that raise: on all ranks or on some, and what the next step has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.errors import NotSupported, RankFailed, UsageError
from pydist.optim import gather_gradients, sharded
from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import DEEP, HIGH, ONE, TWO_GROUPS, on_stages
from support.staged_layers import ORDERS, TARGET, X, assert_gradients, in_sequence, layers

IN_LINE = [ONE] * 2
STOPS = [
    *((IN_LINE, schedule, order, 5) for schedule in ("gpipe", "1f1b") for order in ORDERS),
    (IN_LINE, "gems", None, 5),
    *((IN_LINE, "zero-bubble", order, at) for order in ORDERS for at in (0, 2, 5, 7)),
    *((IN_LINE, schedule, [0, 1, 1, 0, 1], 5) for schedule in ("1f1b", "zero-bubble")),
    ([ONE] * 3, "zero-bubble", [0, 1, 2, 2, 1, 0], 5),
    ([TWO_GROUPS] * 2, "zero-bubble", [0, 1, 1, 0], 3),
    ([DEEP, ONE], "zero-bubble", [0, 1, 1, 0], 5),
]


@pytest.mark.parametrize(("meshes", "schedule", "order", "at"), STOPS, ids=str)
def test_a_step_that_raised_leaves_nothing_to_the_next(meshes, schedule, order, at):
    """The criterion raises on all ranks for a micro-batch, and the script goes on.

    Meshes that need a later pass of one that has raised get to the same exception.
    """
    net, bad = layers(nn.Tanh(), nn.Linear(6, 6)), TARGET.clone()
    bad[at :: 8 // meshes[0].get("data", 1)] = torch.nan

    def loss_of(y, t):
        if t.isnan().any():
            raise ValueError("NaN in the target")
        return F.mse_loss(y, t)

    expected, _ = in_sequence(net)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:2], micro_batches=4, schedule=schedule)
        x, good, wrong = (t.chunk(stages.mesh.data_size)[stages.mesh.data_index]
                          for t in (X, TARGET, bad))  # fmt: skip
        for given in (wrong, good, wrong, wrong, good):
            own.zero_grad()
            try:
                made.step(x, given, loss_of)
            except ValueError:
                assert given is wrong
            else:
                assert given is good
        return own

    for own in on_stages(meshes, rank, order=order):
        assert_gradients(own, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("broken", [0, 1])
def test_an_exception_on_one_mesh_alone_ends_the_step_on_all(schedule, broken):
    """Those that wait for the mesh name its exception, instead of waiting forever."""

    def rank(stages):
        made = pipeline(layers(), stages, X[:2], micro_batches=4, schedule=schedule)
        made.step(X, TARGET, F.mse_loss)
        calls = 0

        def loss_of(y, t):
            nonlocal calls
            calls += 1
            if stages.index == broken and calls == 2:
                raise ValueError("mine alone")
            return F.mse_loss(y, t)

        error = ValueError if stages.index == broken else RankFailed
        with pytest.raises(error, match="mine alone"):
            made.step(X, TARGET, loss_of)

    on_stages([ONE] * 2, rank)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_too_few_samples_on_one_mesh_end_the_step_on_all(order, short, before):
    """Also in the first step, before a pass has shown which tensors go from stage to stage."""
    net = layers(nn.Tanh(), nn.Linear(6, 6))
    expected, _ = in_sequence(net)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:2], micro_batches=4)
        for _ in range(before):
            made.step(X, TARGET, F.mse_loss)
        own.zero_grad()
        rows, error = (2, UsageError) if stages.index == short else (8, RankFailed)
        with pytest.raises(error, match="2 samples in 4 micro-batches"):
            made.step(X[:rows], TARGET[:rows], F.mse_loss)
        own.zero_grad()
        made.step(X, TARGET, F.mse_loss)
        return own

    for own in on_stages(IN_LINE, rank, order=order):
        assert_gradients(own, expected)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_layer_that_raises_in_the_first_step_ends_it_on_all(broken):
    """Also on meshes that no tensor has reached yet; the script goes on."""

    class Raises(nn.Module):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                raise MemoryError("no such luck")
            return x * 1.0

    net = initialized(nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), Raises()))))
    expected, _ = in_sequence(net)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:2], micro_batches=4, cuts=["2", "4"])
        own[2 * broken + 1].on = stages.index == broken
        error = MemoryError if stages.index == broken else RankFailed
        with pytest.raises(error, match="no such luck"):
            made.step(X, TARGET, F.mse_loss)
        own[2 * broken + 1].on = False
        own.zero_grad()
        made.step(X, TARGET, F.mse_loss)
        return own

    for own in on_stages([ONE] * 3, rank):
        assert_gradients(own, expected)


def test_a_step_without_gradients_is_refused_on_all():
    def rank(stages):
        made = pipeline(layers(), stages, X[:2], micro_batches=2)
        with torch.no_grad(), pytest.raises(UsageError, match="a step without gradients"):
            made.step(X, TARGET, F.mse_loss)
        made.step(X, TARGET, F.mse_loss)

    on_stages(IN_LINE, rank)


def test_a_number_of_micro_batches_that_is_none_on_one_mesh_ends_the_step_on_all():
    def rank(stages):
        made = pipeline(layers(), stages, X[:2], micro_batches=2)
        error, count = (RankFailed, 2) if stages.index else (UsageError, 0)
        with pytest.raises(error, match="micro_batches=0"):
            made.step(X, TARGET, F.mse_loss, count)
        made.step(X, TARGET, F.mse_loss)

    on_stages(IN_LINE, rank)


def test_a_failed_step_leaves_nothing_to_another_network():
    """On the same meshes, with the same calls and batch, as of an ensemble."""
    networks = [layers(nn.Tanh()), layers(nn.Tanh())]
    with torch.no_grad():
        for p in networks[1].parameters():
            p.mul_(-1.5).add_(0.1)
    expected = F.mse_loss(networks[1](X), TARGET).item()

    def rank(stages):
        first, second = (
            pipeline(copy.deepcopy(net), stages, X[:2], micro_batches=2) for net in networks
        )
        fails = [stages.index == 1]

        def raise_once(*_):
            if fails and fails.pop():
                raise ValueError("before it receives")

        first.model[-1].register_forward_pre_hook(raise_once)
        with pytest.raises((ValueError, RankFailed)):
            first.step(X, TARGET, F.mse_loss)
        found = [float(second.step(X, TARGET, F.mse_loss)) for _ in range(2)]
        assert found == pytest.approx([expected] * 2, rel=1e-12)

    on_stages(IN_LINE, rank)


def test_a_failed_step_leaves_nothing_to_a_network_of_other_dims():
    flat, deep = nn.Conv2d(1, 2, 3, padding=1), nn.Conv3d(1, 2, 3, padding=1)
    networks = [nn.Sequential(first, nn.Tanh()) for first in (flat, deep)]
    x = [torch.randn(2, 1, 8, 6), torch.randn(2, 1, 4, 8, 6)]

    def rank(stages):
        own = [copy.deepcopy(net) for net in networks]
        pipes = [
            pipeline(net, stages, each[:1], cuts=["1"]) for net, each in zip(own, x, strict=True)
        ]
        fails = [stages.index == 1]

        def raise_once(*_):
            if fails and fails.pop():
                raise ValueError("before it receives")

        own[0][1].register_forward_pre_hook(raise_once)
        with pytest.raises((ValueError, RankFailed)):
            pipes[0].step(x[0], torch.zeros(2, 2, 8, 6), F.mse_loss)
        pipes[1].step(x[1], torch.zeros(2, 2, 4, 8, 6), F.mse_loss)

    on_stages([ONE, HIGH], rank)


@pytest.mark.parametrize("meshes", [IN_LINE, [ONE, DEEP]], ids=str)
def test_an_exception_in_the_last_pass_of_a_mesh_is_named_by_the_others(meshes):
    """They need nothing more of that mesh. What the step has added is refused until zero_grad."""

    def rank(stages):
        net = layers(nn.Tanh())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        made = pipeline(net, stages, X[:2], micro_batches=4)
        made.step(X, TARGET, F.mse_loss)
        calls = []

        def raise_in_the_last(grad):
            calls.append(grad)
            if stages.index == 0 and len(calls) == 4:
                raise ValueError("mine alone")

        net[0].weight.register_hook(raise_in_the_last)
        with pytest.raises((ValueError, RankFailed), match="mine alone"):
            made.step(X, TARGET, F.mse_loss)
        for use in (optimizer.step, lambda: made.step(X, TARGET, F.mse_loss)):
            with pytest.raises(NotSupported, match=r"raised.*zero_grad\(\)"):
                use()
        optimizer.zero_grad()
        sum(p.square().sum() for p in net.parameters()).backward()  # not of the step
        with pytest.raises(UsageError, match="expected a count"):
            made.step(X, TARGET, F.mse_loss, micro_batches=0)
        made.step(X, TARGET, F.mse_loss)
        optimizer.step()

    on_stages(meshes, rank)


def test_gradients_owed_by_two_meshes_after_a_failed_step():
    """With GEMS the middle mesh waits for both neighbors by the same tag."""
    net, x, target = layers(nn.Tanh(), nn.Linear(6, 6)), X[:6], TARGET[:6]
    whole = copy.deepcopy(net)
    F.mse_loss(whole(x), target).backward()

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, x, micro_batches=3, schedule="gems")
        calls = []

        def loss_of(y, t):
            calls.append(0)
            if stages.index == 1 and len(calls) == 2:
                raise ValueError("once")
            return F.mse_loss(y, t)

        with pytest.raises((ValueError, RankFailed)):
            made.step(x, target, loss_of)
        own.zero_grad()
        made.step(x, target, F.mse_loss)
        for p, q in zip(own.parameters(), whole.parameters(), strict=True):
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)

    on_stages([ONE] * 3, rank)


def test_gradients_of_a_step_that_the_ranks_refuse_at_its_end_are_not_used():
    def rank(stages):
        net = layers(nn.Tanh())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        made = pipeline(net, stages, X[:2], micro_batches=2)
        factor = torch.tensor(1.0 + stages.index)
        with pytest.raises(UsageError, match="the criterion scales the loss by"):
            made.step(X, TARGET, lambda y, t: F.mse_loss(y, t) * factor)
        with pytest.raises(NotSupported, match="before it raised"):
            optimizer.step()
        optimizer.zero_grad()
        made.step(X, TARGET, F.mse_loss)
        optimizer.step()

    on_stages(IN_LINE, rank)


def fails_on_mesh_1(stages, at):
    """Returns a criterion that raises there in call number `at`."""
    calls = []

    def loss_of(y, t):
        calls.append(0)
        if stages.index == 1 and len(calls) == at:
            raise ValueError("a bad sample")
        return F.mse_loss(y, t)

    return loss_of


@pytest.mark.parametrize(
    ("partitioned", "how"),
    [(False, "as it is"), (False, "clipped"), (False, "unscaled"),
     (True, "as it is"), (True, "unscaled"), (True, "gathered")],
)  # fmt: skip
def test_partial_gradients_are_refused_until_they_are_cleared(partitioned, how):
    """Also if they are NaN after changes in place, and however often a step is refused."""
    net = layers(nn.Tanh())
    expected, _ = in_sequence(net)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:2], micro_batches=4)
        optimizer: Any = torch.optim.SGD(own.parameters(), 0.1)
        optimizer = sharded(optimizer, own, "always") if partitioned else optimizer
        made.step(X, TARGET, F.mse_loss)
        with pytest.raises((ValueError, RankFailed), match="a bad sample"):
            made.step(X, TARGET, fails_on_mesh_1(stages, 3))
        for _ in range(2):
            with pytest.raises((NotSupported, RankFailed), match="before it raised"):
                made.step(X, TARGET, F.mse_loss)
        if how == "clipped":
            made.clip_grad_norm_(1.0)
        elif how == "unscaled":
            made.unscale_(torch.amp.GradScaler("cpu", enabled=False), optimizer)
        elif how == "gathered":
            gather_gradients(own)
        # Two checks refuse it; which one is first depends on what the process has done before.
        with pytest.raises(NotSupported, match=r"before it raised|by a backward\(\) that raised"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=how != "as it is")
        made.step(X, TARGET, F.mse_loss)
        gather_gradients(own)
        return own

    for own in on_stages([DEEP, DEEP] if partitioned else IN_LINE, rank):
        assert_gradients(own, expected)


def test_ranks_without_a_part_of_partial_gradients_refuse_them_too():
    net = initialized(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)))
    x, target = randn(8, 1, seed=1), randn(8, 1, seed=2)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, x[:2], cuts=["2"], micro_batches=2)
        optimizer = sharded(torch.optim.SGD(own.parameters(), 0.1), own, "always")
        with pytest.raises(UsageError, match="scales the loss by"):
            made.step(x, target, lambda y, t: F.mse_loss(y, t) * torch.tensor(1.0 + stages.index))
        with pytest.raises(NotSupported, match=r"before it raised|by a backward\(\) that raised"):
            optimizer.step()

    on_stages([DEEP, DEEP], rank)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_step_that_raised_leaves_the_gradients_of_inputs_as_they_were(earlier):
    net = layers(nn.Tanh())

    def rank(stages):
        own, whole, x = copy.deepcopy(net), copy.deepcopy(net), X.clone().requires_grad_()
        made = pipeline(own, stages, X[:2], micro_batches=4)
        for _ in range(earlier):
            made.step(x, TARGET, F.mse_loss)
        with pytest.raises((ValueError, RankFailed), match="a bad sample"):
            made.step(x, TARGET, fails_on_mesh_1(stages, 3))
        own.zero_grad()
        made.step(x, TARGET, F.mse_loss)
        given = X.clone().requires_grad_()
        for _ in range(1 + earlier):
            F.mse_loss(whole(given), TARGET).backward()
        torch.testing.assert_close(x.grad, given.grad, rtol=1e-11, atol=1e-14)

    on_stages(IN_LINE, rank)
