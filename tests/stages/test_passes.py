"""Tests of several passes over a batch: what scripts and networks change counts once."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.comm import Transport
from pydist.errors import NotSupported
from pydist.stages import pipeline
from support.networks.small import initialized
from support.staged import ONE, TWO_GROUPS, on_stages
from support.staged_layers import TARGET, X, in_sequence, layers


def assert_in_stages(net, order=None, meshes=None, criterion=F.mse_loss, **options):
    """Asserts that a step in stages has the gradients and buffers of the sequence."""
    expected, total = in_sequence(net, criterion=criterion)
    grads = {n: p.grad for n, p in expected.named_parameters()}
    meshes = [ONE] * 2 if meshes is None else meshes

    def rank(stages):
        own, loss_of = copy.deepcopy(net), copy.deepcopy(criterion)
        made = pipeline(own, stages, X[:2].clone(), micro_batches=4, **options)
        loss = made.step(X.clone(), TARGET.clone(), loss_of)
        made.gather()
        return loss.item(), own

    for loss, own in on_stages(meshes, rank, order=order):
        assert loss == pytest.approx(total, rel=1e-12)
        for name, p in own.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, grads[name], rtol=1e-11, atol=1e-14, msg=name)
        for (name, ours), theirs in zip(own.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


class Gate(nn.Module):
    """Network whose second stage needs a part of the argument, which the first one takes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        gate = x[:, :1]
        return self.second(torch.tanh(self.first(x))) * gate


def test_what_a_program_may_change_is_not_lent(monkeypatch):
    """Transports copy no tensor between stages but parts of the arguments."""
    lent, send = [], Transport.send

    def record(self, tensor, dest, tag=0, *, lender=None):
        if tensor.is_floating_point():
            lent.append((tuple(tensor.shape), lender is not None))
        send(self, tensor, dest, tag, lender=lender)

    monkeypatch.setattr(Transport, "send", record)
    net = initialized(Gate())
    assert_in_stages(net, cuts=["second"])
    hidden, gate = 2 * 6, 2
    forward_and_backward = 2
    assert Counter(lent) == {
        ((hidden,), True): 4 * forward_and_backward,
        ((gate,), False): 4,
    }


@pytest.mark.parametrize(("schedule", "skips"), [("1f1b", "direct"), ("1f1b", "relay"),
                                                 ("gems", "direct")])  # fmt: skip
def test_a_plan_knows_the_routes_between_stages(schedule, skips):
    """Those that passes show, also to the criterion, which uses a result of an early stage."""

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first = torch.tanh(self.layers[0](x))
            places = first.argmax(1)  # has no gradient
            y = first
            for layer in self.layers[1:]:
                y = torch.tanh(layer(y))
            return y + first, places, first

    def criterion(found: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
        y, places, first = found
        return F.mse_loss(y, target) + F.mse_loss(first, target) + 0 * places.double().mean()

    cuts = ["layers.2", "layers.4"]

    def rank(stages):
        made = pipeline(initialized(Early()), stages, X[:2], micro_batches=2, cuts=cuts,
                        schedule=schedule, skips=skips)  # fmt: skip
        planned = {*made._transfers._planned}
        made.step(X, TARGET, criterion)
        return planned, {*made._transfers._seen}

    for planned, seen in on_stages([ONE] * 3, rank):
        assert planned == seen
        assert len(seen) > 1


class Remembers(nn.Module):
    """Scales by what it has counted, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.last = how, Counter(), deque([0], maxlen=2)
        self.nested, self.tensors = {"of": {"calls": 0}}, {"calls": torch.zeros(())}
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counter":
            self.calls["all"] += 1
            return x * self.calls["all"]
        if self.how == "deque":
            self.last.append(self.last[-1] + 1)
            return x * self.last[-1]
        if self.how == "nested":
            self.nested["of"]["calls"] += 1
            return x * self.nested["of"]["calls"]
        if self.how == "tensor in a dict":
            self.tensors["calls"] += 1
            return x * float(self.tensors["calls"])
        self.count = self.count + 1
        return x * self.count


@pytest.mark.parametrize("how", ["counter", "deque", "nested", "tensor in a dict", "new buffer"])
@pytest.mark.parametrize(
    ("order", "options"),
    [(None, {}), (None, {"recompute": True}), ([0, 1, 1, 0], {}), ([0, 1, 0, 1], {}),
     (None, {"schedule": "gems"}), (None, {"running_statistics": "batch"}),
     ([0, 1, 0], {"running_statistics": "batch", "recompute": True})], ids=str,
)  # fmt: skip
def test_what_modules_remember_counts_once(how, order, options):
    assert_in_stages(layers(Remembers(how)), order, **options)


class Drawing(nn.Module):
    """Draws from Python's and NumPy's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("order", [[0], [0, 0], [0, 0, 0]], ids=str)
def test_pythons_and_numpys_generators_draw_once(order, options):
    """On one mesh: ranks that are threads share the generators."""
    net = layers(Drawing())

    def seeded():
        random.seed(7)
        np.random.seed(7)

    seeded()
    expected, _ = in_sequence(net)
    after = random.random(), np.random.rand()

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:2], micro_batches=4, **options)
        seeded()
        made.step(X, TARGET, F.mse_loss)
        return own, (random.random(), np.random.rand())

    ((own, found),) = on_stages([ONE], rank, order=order)
    assert found == after
    for ours, theirs in zip(own.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14)


class Shifting(nn.Module):
    """A criterion that changes its target in place, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        target -= 0.3
        self.calls += 1
        self.number += 1
        return F.mse_loss(y, target) * float(self.calls + self.number)


@pytest.mark.parametrize(
    ("order", "options"),
    [(None, {"schedule": "gpipe", "recompute": True}), ([0, 1, 1, 0], {}), ([0, 1, 0, 1], {}),
     (None, {"schedule": "gems"})], ids=str,
)  # fmt: skip
def test_a_criterion_is_as_if_it_were_called_once(order, options):
    assert_in_stages(layers(), order, criterion=Shifting(), **options)


class Turned(nn.Module):
    """Views of a transposed tensor, which depend on its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.turn, self.back = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).view(-1, 2, 2).transpose(1, 2)
        h = self.turn(h.sin())
        return self.back(h.transpose(1, 2).view(-1, 4))


def test_plain_tensors_keep_their_strides_from_stage_to_stage():
    assert_in_stages(initialized(Turned()), cuts=["back"])
    assert_in_stages(initialized(Turned()))


class Embedded(nn.Module):
    """Changes a parameter in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.n = nn.Linear(4, 4), nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.linear(x) * self.n


def test_what_can_not_be_repeated_is_refused():
    def rank(stages):
        with pytest.raises(NotSupported, match="changes the parameter 'n'"):
            pipeline(initialized(Embedded()), stages, X[:2])

    on_stages([ONE], rank)

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    def other(stages):
        made = pipeline(layers(Buffered()), stages, X[:2], micro_batches=4, schedule="gpipe")
        with pytest.raises(NotSupported, match="changes in place"):
            made.step(X, TARGET, F.mse_loss)

    on_stages([ONE], other)


SIZES = [(4, 4), (3, 4), (2, 5)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("meshes", "order", "options"),
    [([TWO_GROUPS], None, {}), ([TWO_GROUPS] * 2, None, {"schedule": "gpipe"}),
     ([TWO_GROUPS] * 2, [0, 1, 1, 0], {}), ([TWO_GROUPS] * 2, None, {"schedule": "gems"})], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("normed", [False, True])
def test_tables_in_groups_of_any_size(sizes, meshes, order, options, normed):
    """Plain tensors: weights of unequal groups, and batch norm over all of them."""
    if normed and "schedule" in options and options["schedule"] == "gems":
        options = {**options, "running_statistics": "batch"}
    net = layers(*([nn.BatchNorm1d(6)] if normed else []))
    alone = copy.deepcopy(net)
    micro, batch = 2, sum(sizes)
    starts = [0, sizes[0]]
    for m in range(micro):
        rows = [starts[d] + i for d in range(2)
                for i in range(sizes[d] * m // micro, sizes[d] * (m + 1) // micro)]  # fmt: skip
        (F.mse_loss(alone(X[rows]), TARGET[rows]) * len(rows) / batch).backward()
    grads = {n: p.grad for n, p in alone.named_parameters()}

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:3], micro_batches=micro, **options)
        d = stages.mesh.data_index
        rows = slice(starts[d], starts[d] + sizes[d])
        made.step(X[rows], TARGET[rows], F.mse_loss)
        made.gather()
        return own

    for own in on_stages(meshes, rank, order=order):
        for name, p in own.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, grads[name], rtol=1e-10, atol=1e-13, msg=name)
        if normed and "running_statistics" not in options:
            for ours, theirs in zip(own.buffers(), alone.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_groups_may_scale_their_losses_by_numbers_of_their_own():
    """Only the ranks of one sample group have the same targets."""

    def rank(stages):
        made = pipeline(layers(), stages, X[:2], micro_batches=2)
        rows = slice(4 * stages.mesh.data_index, 4 * stages.mesh.data_index + 4)
        made.step(X[rows], TARGET[rows], lambda y, t: F.mse_loss(y, t) / t.square().mean())

    on_stages([TWO_GROUPS] * 2, rank)
