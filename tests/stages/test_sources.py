"""Tests that stages know which weights a network's plain tensors and values come from."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.errors import NotSupported, PydistError, RankFailed, UsageError
from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import ONE, on_stages


class Chain(nn.Module):
    """Two layers, one on each stage, and what `use` does with them."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use = use
        self.register_buffer("ema", torch.zeros(6, 6))
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, torch.tanh(self.b(torch.tanh(self.a(x)))))


class Weights(nn.Module):
    """Four weights in a row; training makes a call more, so that evaluation's numbers differ."""

    def __init__(self, of: Callable[[Any], list[Tensor]]) -> None:
        super().__init__()
        self.ws = nn.ParameterList(randn(6, 6, seed=i) / 2 for i in range(4))
        self.cached: list[Tensor] | None = None
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * 2 - x
        for w in self.of(self):
            x = torch.tanh(F.linear(x, w))
        return x


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x + F.linear(x, weight)


def _filled(net: Chain, x: Tensor) -> Tensor:
    made = torch.zeros(6, 6, dtype=x.dtype)
    made[:3] = net.a.weight.detach()[:3]
    return _linear(x, made)


def _row(net: Chain, x: Tensor) -> Tensor:
    made = torch.zeros(6, 6, dtype=x.dtype)
    with torch.no_grad():
        made[1].copy_(net.a.weight[1])
        made.diagonal().add_(net.a.bias)
    return _linear(x, made)


def _parameter(net: Chain, x: Tensor) -> Tensor:
    return _linear(x, nn.Parameter(net.a.weight.detach(), requires_grad=False))


def _copied(net: Chain, x: Tensor) -> Tensor:
    return x + copy.deepcopy(net.a).requires_grad_(False)(x)


def _mapped(net: Chain, x: Tensor) -> Tensor:
    return _linear(x, torch.vmap(lambda row: row / row.norm())(net.a.weight.detach()))


def _averaged(net: Chain, x: Tensor) -> Tensor:
    if net.training:
        with torch.no_grad():
            net.ema.mul_(0.5).add_(net.b.weight)
    return x if net.training else _linear(x, net.ema)


def _asserted(net: Chain, x: Tensor) -> Tensor:
    """What is read is the same on all ranks; evaluation does not compare it."""
    if not net.training:
        return x + net.b.bias
    assert torch.isfinite(net.a.weight).all()
    assert torch.allclose(net.a.weight, net.a.weight.detach())
    noise = torch.distributions.Normal(net.b.bias, net.b.bias.exp())  # checks its arguments
    return x + noise.mean


def _scratch(net: Chain, x: Tensor) -> Tensor:
    """A copy of a weight that another one changes is no longer that weight."""
    net.a.weight.detach().clone().mul_(net.b.bias)
    net.b.weight.detach().clone()[0].add_(net.a.bias)
    return x


USES = {
    each.__name__: each
    for each in (_filled, _row, _parameter, _copied, _mapped, _averaged, _asserted, _scratch)
}
BATCHES = [(randn(4, 6, seed=i), randn(4, 6, seed=i + 9)) for i in range(4)]


def trained(model: nn.Module, step: Any, call: Any, between: Any = lambda: None) -> list[Tensor]:
    """Returns the losses of steps, with two evaluations after each."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), []
    for x, target in BATCHES:
        found.append(torch.as_tensor(step(x, target, F.mse_loss)))
        between()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        found += [call(randn(4, 6, seed=seed)) for seed in (77, 78)]
        model.train()
    return found


def compare(model: nn.Module, between: str = "", **options: Any) -> None:
    """Compares a run on two stages with one device; the buffers after `gather` as well."""
    one = copy.deepcopy(model)

    def alone(x, target, loss):
        value = loss(one(x), target)
        value.backward()
        return value.detach()

    expected = trained(one, alone, torch.no_grad()(one))

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], **options)
        found = trained(mine, made.step, made, getattr(made, between, lambda: None))
        made.gather()
        return found, mine.state_dict()

    for found, state in on_stages([ONE] * 2, rank):
        for mine, theirs in zip(found, expected, strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(state, dict(one.state_dict()), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", USES)
def test_what_is_computed_from_a_weight_stays_with_it(name):
    compare(initialized(Chain(USES[name])), cuts=["b"])


def _identities(net: Weights) -> list[Tensor]:
    return [Identity.apply(w) for w in net.ws] if net.training else list(net.ws)


def _cached(net: Weights) -> list[Tensor]:
    if net.training or net.cached is None:
        net.cached = [w * 1.5 for w in net.ws]
    found = net.cached
    if net.training:
        net.cached = None
    return found


def _written(net: Weights) -> list[Tensor]:
    if net.training:
        return [torch.cat([w[:3], w[3:]]) for w in net.ws]
    found = [torch.zeros_like(w) for w in net.ws]
    for each, w in zip(found, net.ws, strict=True):
        each[:3], each[3:] = w[:3], w[3:]
    return found


@pytest.mark.parametrize("of", [_identities, _cached, _written])
def test_evaluation_computes_weights_in_another_way(of):
    compare(initialized(Weights(of)), balance="memory")


def test_weights_that_change_after_gather():
    compare(initialized(Weights(lambda net: list(net.ws))), "gather", balance="memory")


@pytest.mark.parametrize("short", [0, 1])
def test_weights_that_all_ranks_load_after_gather(short):
    """Also after a step that fails on one rank alone, and that the script survives."""
    model = initialized(Weights(lambda net: [w * 1 for w in net.ws] if net.training else net.ws))
    best = {name: x * 0.9 for name, x in model.state_dict().items()}

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], micro_batches=2, balance="memory")
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        made.step(*BATCHES[0], F.mse_loss)
        optimizer.step()
        made.gather()
        x, target = BATCHES[1]
        count = 1 if stages.world.rank == short else 4
        with pytest.raises(PydistError):
            made.step(x[:count], target[:count], F.mse_loss)
        mine.eval()
        made(BATCHES[1][0])
        made.gather()
        mine.load_state_dict(best)
        made.gather()
        return made(BATCHES[1][0])

    model.load_state_dict(best)
    model.eval()
    expected = model(BATCHES[1][0])
    (found,) = (y for y in on_stages([ONE] * 2, rank) if y is not None)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loader", [0, 1])
def test_one_rank_alone_loads_weights_after_gather(loader):
    model = initialized(Chain(lambda net, x: x))

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["b"])
        made.step(*BATCHES[0], F.mse_loss)
        made.gather()
        if stages.world.rank == loader:
            mine.load_state_dict(model.state_dict())
        mine.eval()
        made(BATCHES[0][0])

    with pytest.raises(UsageError, match=r"changed weights after pipe\.gather"):
        on_stages([ONE] * 2, rank)


def test_a_buffer_of_weights_of_two_stages():
    def use(net, x):
        with torch.no_grad():
            net.ema.copy_(net.a.weight + net.b.weight)
        return x

    model = initialized(Chain(use))

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["b"])
        made.step(*BATCHES[0], F.mse_loss)
        made.gather()

    with pytest.warns(UserWarning, match=r"ema is computed from a\.weight, b\.weight, which"):
        on_stages([ONE] * 2, rank)


def test_what_a_pass_computes_is_freed_after_it():
    found: list[weakref.ref[Tensor]] = []

    def use(net, x):
        made = net.a.weight.detach() * 2
        found.append(weakref.ref(made))
        return _linear(x, made)

    model = initialized(Chain(use))

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["b"])
        for x, target in BATCHES:
            made.step(x, target, F.mse_loss)
        made.gather()

    on_stages([ONE] * 2, rank)
    gc.collect()
    assert len(found) > 8
    assert not [each for each in found if each() is not None]


READS = {
    "item": lambda net, x: x * net.a.weight.detach().norm().item(),
    "bool": lambda net, x: x * 2 if (net.a.weight.detach() == net.first).all() else x * 0.5,
    "float": lambda net, x: F.leaky_relu(x, float(net.a.bias.detach()[0])),
    "tolist": lambda net, x: x * net.a.bias.tolist()[0],
    "numpy": lambda net, x: _linear(x, torch.from_numpy(net.a.weight.detach().numpy() * 1)),
}


@pytest.mark.parametrize("name", READS)
def test_values_that_one_stage_has_are_not_read(name):
    model = initialized(Chain(READS[name]))
    model.first = model.a.weight.detach().clone()

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["b"])
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        made.step(*BATCHES[0], F.mse_loss)  # all ranks have the initial values
        optimizer.step()
        with pytest.raises(NotSupported, match=r"differs between ranks: .* of a\.(weight|bias)"):
            made.step(*BATCHES[1], F.mse_loss)
        mine.eval()
        has_value = stages.index == 0
        refused = pytest.raises(NotSupported, match="before evaluation")
        with nullcontext() if has_value else refused:
            made(BATCHES[1][0])
        made.gather()
        mine.eval()
        y = made(BATCHES[0][0])
        return y, mine.state_dict()

    for y, state in on_stages([ONE] * 2, rank):
        one = copy.deepcopy(model)
        one.load_state_dict(state)
        if y is not None:
            torch.testing.assert_close(y, one(BATCHES[0][0]))


@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("reader", [0, 1])
def test_one_rank_reads_for_its_own_log(layer, reader):
    """It may read what its own stage trains, as a hook that prints does."""
    model = initialized(Chain(lambda net, x: x))

    def rank(stages):
        mine, logged = copy.deepcopy(model), []
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["b"])
        if stages.world.rank == reader:
            of = getattr(mine, layer)
            of.register_forward_pre_hook(lambda own, _: logged.append(own.weight.norm().item()))
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        made.step(*BATCHES[0], F.mse_loss)
        optimizer.step()
        norm = float(getattr(mine, layer).weight.detach().norm())
        if "ab"[reader] == layer:
            made.step(*BATCHES[1], F.mse_loss)
            mine.eval()
            made(BATCHES[0][0])
            assert stages.world.rank != reader or logged[1:] == [norm, norm]
        else:
            with pytest.raises(NotSupported, match="differs between ranks"):
                made.step(*BATCHES[1], F.mse_loss)

    on_stages([ONE] * 2, rank)


def test_a_criterion_scales_by_a_number_of_its_stages_weights():
    model = initialized(Chain(lambda net, x: x))

    def trained_with(mine, step):
        def loss(y, target):
            return F.mse_loss(y, target) * mine.b.weight.detach().norm()

        optimizer = torch.optim.SGD(mine.parameters(), 0.5)
        for x, target in BATCHES:
            yield float(step(x, target, loss))
            optimizer.step()
            optimizer.zero_grad()

    one = copy.deepcopy(model)

    def alone(x, target, loss):
        value = loss(one(x), target)
        value.backward()
        return value.detach()

    expected = list(trained_with(one, alone))

    def rank(stages):
        mine = copy.deepcopy(model)
        return list(trained_with(mine, pipeline(mine, stages, BATCHES[0][0], cuts=["b"]).step))

    for losses in on_stages([ONE] * 2, rank):
        assert losses == pytest.approx(expected, rel=1e-12)


class Padded(nn.Module):
    """A network that makes a call of its own in front of its layers for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 6 - x.shape[1])) if x.shape[1] < 6 else x
        return self.c(torch.cat([x, self.b(self.a(x))], 1))


@pytest.mark.parametrize("widths", [(6, 5, 6, 4), (5, 6, 4, 6)])
def test_a_call_in_front_does_not_begin_the_stage_of_a_later_one(widths):
    model = initialized(Padded())
    one, expected = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(one.parameters(), 0.5)
    for (x, target), width in zip(BATCHES, widths, strict=True):
        loss = F.mse_loss(one(x[:, :width]), target)
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()

    def rank(stages):
        mine = copy.deepcopy(model)
        made, found = pipeline(mine, stages, BATCHES[0][0], cuts=["Padded"]), []
        optimizer = torch.optim.SGD(mine.parameters(), 0.5)
        for (x, target), width in zip(BATCHES, widths, strict=True):
            found.append(float(made.step(x[:, :width], target, F.mse_loss)))
            assert (mine.a.weight.grad is None) == (stages.index == 1)
            optimizer.step()
            optimizer.zero_grad()
        return found

    for losses in on_stages([ONE] * 2, rank):
        assert losses == pytest.approx(expected, rel=1e-12)


class Alternating(nn.Module):
    """A network with a batch norm that alternates between two positions in its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.extra = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = torch.tanh(x) if self.extra else x
        return self.b(torch.tanh(self.norm(x)))


def test_micro_batches_that_update_statistics_on_two_meshes():
    model = initialized(Alternating())

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], micro_batches=2, cuts=["Alternating"])
        calls = mine.a.register_forward_hook(lambda *_: setattr(mine, "extra", not mine.extra))
        with pytest.raises(NotSupported, match="updated it on the meshes"):
            made.step(*BATCHES[0], F.mse_loss)
        calls.remove()

    on_stages([ONE] * 2, rank)


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_optimizer_in_the_backward_pass(by_hand):
    model = initialized(Chain(lambda net, x: x))

    def rank(stages):
        mine = copy.deepcopy(model)
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in mine.parameters()}

        @torch.no_grad()
        def change(p):
            p.sub_(0.1 * p.grad) if by_hand else optimizers[p].step()
            p.grad = None

        for p in optimizers:
            p.register_post_accumulate_grad_hook(change)
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["b"])
        refusal = "was changed in" if by_hand else "SGD within"
        with pytest.raises((NotSupported, RankFailed), match=f"{refusal} the backward pass"):
            made.step(*BATCHES[0], F.mse_loss)

    on_stages([ONE] * 2, rank)


def test_an_optimizer_of_all_gradients_at_once():
    model = initialized(Chain(lambda net, x: x))

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["b"])
        optimizer = torch.optim.LBFGS(mine.parameters())
        with pytest.raises(NotSupported, match="LBFGS of a network in stages"):
            optimizer.step(lambda: made.step(*BATCHES[0], F.mse_loss))

    on_stages([ONE] * 2, rank)
