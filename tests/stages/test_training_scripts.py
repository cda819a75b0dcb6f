"""Tests of stages in ordinary training scripts: what an outside hunt found wrong, and its kin."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pydist.errors import UsageError
from pydist.stages import pipeline
from support.equivalence import assert_equal, randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, TWO_GROUPS, Between, on_stages, results

X, TARGET = randn(4, 1, 6, 4, 4, seed=1), randn(4, 2, 6, 4, 4, seed=2)
STEPS = 3


def trained(net, step, optimizer):
    """Returns the parameters after a few steps."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        step()
        optimizer.step()
    return {n: p.detach().clone() for n, p in net.named_parameters()}


def check_training(net, criterion=lambda net: F.mse_loss, meshes=(ONE, ONE), cuts=("last",)):
    """Compares the parameters after steps of AdamW in stages with those of one device."""
    net = initialized(net)
    whole = copy.deepcopy(net)
    loss_of = criterion(whole)
    data = meshes[0].get("data", 1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.1)
    expected = trained(whole, lambda: loss_of(whole(X), TARGET).backward(), optimizer)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=list(cuts))
        rows = slice(stages.mesh.data_index * 4 // data, (stages.mesh.data_index + 1) * 4 // data)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.01, weight_decay=0.1)
        loss = criterion(own)
        trained(own, lambda: made.step(X[rows], TARGET[rows], loss), optimizer)
        made.gather()
        found = {n: p.detach() for n, p in own.named_parameters()}
        assert_equal(found, expected, dict.fromkeys(expected, 1e-9))

    on_stages(list(meshes), rank)


@pytest.mark.parametrize("meshes", [(ONE, ONE), (DEEP, ONE), (TWO_GROUPS, TWO_GROUPS)], ids=str)
def test_weights_that_reach_other_stages_through_plain_calls(meshes):
    class Net(Between):
        def forward(self, x):
            x = torch.relu(self.first(x))
            weight = torch.cat([self.first.weight, self.first.weight * 2], 1)
            return F.conv3d(x, weight.flip(2), self.last.bias, padding=1)

    check_training(Net(), meshes=meshes, cuts=("Net",))


@pytest.mark.parametrize("meshes", [(ONE, ONE), (DEEP, ONE), (TWO_GROUPS, TWO_GROUPS)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x * net.last.weight.detach().mean(),
        lambda net, x: x * without_gradient(lambda: net.last.bias.square().sum() + 1),
        lambda net, x: F.conv3d(x, net.last.weight.data, padding=1),
        lambda net, x: without_gradient(lambda: net.last(x)) + x,
    ],
)
def test_weights_that_other_stages_use_without_a_gradient(meshes, function):
    """They get the gradient of the stage that trains the weight, or would keep old values."""
    check_training(Between(function), meshes=meshes)


def without_gradient(function):
    """Returns the result of a function under no_grad."""
    with torch.no_grad():
        return function()


def test_parameters_of_a_criterion():
    class Net(Between):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

    def criterion(net):
        return lambda y, t: F.mse_loss(y, t) * torch.exp(-net.scale).squeeze() + net.scale.squeeze()

    check_training(Net(), criterion)


def test_penalties_on_parameters():
    def criterion(net):
        def loss(y, t):
            return F.mse_loss(y, t) + 0.1 * sum(p.pow(2).sum() for p in net.parameters())

        return loss

    check_training(Between(), criterion)


def test_a_head_without_gradient_is_not_decayed():
    """Its input crosses stages, but nothing uses what is computed from it."""

    class Net(Between):
        def __init__(self):
            super().__init__()
            self.head = nn.Conv3d(2, 2, 1)

        def forward(self, x):
            y = self.first(x)
            unused = self.head(y)
            out = self.last(y)
            _ = unused + out
            return out

    check_training(Net())


def test_heads_that_only_training_uses():
    """The plan was made in evaluation mode."""

    class Net(Between):
        def __init__(self):
            super().__init__()
            self.aux = nn.Conv3d(2, 2, 1)

        def forward(self, x):
            y = self.first(x)
            out = self.last(y)
            return out + self.aux(y) if self.training else out

    net = initialized(Net())
    whole = copy.deepcopy(net)
    F.mse_loss(whole(X), TARGET).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)

    def rank(stages):
        own = copy.deepcopy(net).eval()
        made = pipeline(own, stages, X[:1], cuts=["last"])
        own.train()
        loss = made.step(X, TARGET, F.mse_loss)
        torch.testing.assert_close(made.clip_grad_norm_(1e9).double(), norm, rtol=1e-6, atol=0)
        found = results(made, loss)
        del found["loss"]
        assert_equal(found, {n: p.grad for n, p in whole.named_parameters()})
        with torch.no_grad():
            own.aux.weight.add_(stages.index)  # as an optimizer does on the last stage
        made.gather()
        assert float((own.aux.weight - net.aux.weight).detach().mean()) == pytest.approx(1)

    on_stages([ONE, ONE], rank)


def test_outputs_of_earlier_stages():
    class Net(Between):
        def forward(self, x):
            y = self.first(x)
            return {"early": y, "late": [self.last(y)]}

    net = initialized(Net())
    with torch.no_grad():
        expected = net(X)
    for meshes in ([ONE, ONE], [DEEP, ONE], [ONE, DEEP]):

        def rank(stages):
            out = pipeline(copy.deepcopy(net), stages, X[:1], cuts=["last"])(X)
            if stages.is_last:
                found = {"early": out["early"].full_tensor(), "late": out["late"][0].full_tensor()}
                assert_equal(found, {"early": expected["early"], "late": expected["late"][0]})

        on_stages(meshes, rank)


@pytest.mark.parametrize("shape", [(4, 1, 6, 4, 4), (4, 8)], ids=str)
def test_masks_of_one_module_differ_between_stages(shape):
    """On volumes, and on plain tensors."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
            self.middle = nn.Identity()

        def forward(self, x):
            y = F.dropout(x * self.a, 0.5)
            self.seen = [y]
            y = self.middle(y + 0)
            z = F.dropout(torch.ones_like(y) * self.b, 0.5)
            self.seen.append(z)
            return y + z

    x = torch.ones(shape, dtype=torch.float64)

    def rank(stages):
        net = Net().double()
        made = pipeline(net, stages, x, balance="memory")
        torch.manual_seed(0)
        made.step(x, x, F.mse_loss)
        return [(each.owner, each.value) for each in net.seen]

    ranks = on_stages([ONE, ONE], rank)
    (first, _), (second, _) = ranks[0]
    assert (first, second) == (0, 1), "the network is cut between the masks"
    masks = [ranks[stage][i][1] for i, stage in enumerate((0, 1))]
    masks = [getattr(m, "_local", m).detach() != 0 for m in masks]
    assert 0.1 < float((masks[0] != masks[1]).double().mean()) < 0.9


def test_ordinary_scripts():
    """Casts, copies, inputs changed in place, and weights' names of types."""

    def function(net, x):
        z = x.to(torch.float64, copy=True)
        z.add_(1)
        assert x.type() == "torch.DoubleTensor"
        w = x.transpose(2, 3).contiguous()
        w.mul_(2)
        assert not x.detach().requires_grad
        assert x.requires_grad == torch.is_grad_enabled()
        return (x + z).type(x.type()) + w.transpose(2, 3)

    class InPlace(Between):
        def forward(self, x):
            return super().forward(F.relu(x, inplace=True))

    for net in (Between(function), InPlace(function)):
        initialized(net)
        whole, loss = copy.deepcopy(net), 0.0
        for m in range(2):
            part = F.mse_loss(whole(X[2 * m : 2 * m + 2].clone()), TARGET[2 * m : 2 * m + 2]) / 2
            part.backward()
            loss += part.detach()
        expected = {"loss": loss, **{n: p.grad for n, p in whole.named_parameters()}}

        def rank(stages, net=net, expected=expected):
            made = pipeline(copy.deepcopy(net), stages, X[:1].clone(), cuts=["last"],
                            micro_batches=2)  # fmt: skip
            assert_equal(results(made, made.step(X.clone(), TARGET, F.mse_loss)), expected)

        on_stages([ONE, ONE], rank)


def test_copies_of_the_network_are_no_pipelines():
    """Such as an average of its weights; of a network in one stage it can be evaluated."""

    def rank(stages):
        net = initialized(Between())
        made = pipeline(net, stages, X[:1])
        average = AveragedModel(net)
        made.step(X, TARGET, F.mse_loss)
        average.update_parameters(net)
        with torch.no_grad():
            y, expected = average(X), initialized(Between())(X)
        assert_equal({"y": y.full_tensor()}, {"y": expected})

    on_stages([ONE], rank)


def test_inference_mode():
    net = initialized(Between())
    with torch.no_grad():
        expected = net(X)

    def rank(stages):
        made = pipeline(copy.deepcopy(net), stages, X[:1], cuts=["last"])
        with torch.inference_mode():
            out = made(X)
        if out is not None:
            assert_equal({"y": out.full_tensor()}, {"y": expected})

    on_stages([ONE, ONE], rank)


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("trained", ["all", "by kind", "one stage"])
@pytest.mark.parametrize("meshes", [(ONE, ONE), (DEEP, ONE), (TWO_GROUPS, TWO_GROUPS)], ids=str)
def test_a_scaler_skips_steps_on_all_stages(where, trained, meshes):
    """An overflow on one stage counts on the others, for the same optimizer only."""
    net = initialized(Between())

    def train(net, unscale, step_of):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        parameters = dict(net.named_parameters())
        names = {
            "all": [list(parameters)],
            "by kind": [["first.weight", "last.weight"], ["first.bias", "last.bias"]],
            "one stage": [["first.weight", "first.bias"]],
        }[trained]
        optimizers = [torch.optim.SGD([parameters[n] for n in each], lr=0.1) for each in names]
        overflows = iter([False, True, False, False, True])
        getattr(net, where).bias.register_hook(lambda g: g * torch.inf if next(overflows) else g)
        scales = []
        for _ in range(5):
            net.zero_grad()
            step_of(lambda y, t: scaler.scale(F.mse_loss(y, t)))
            for optimizer in optimizers:
                unscale(scaler, optimizer)
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    whole = copy.deepcopy(net)
    scales = train(
        whole,
        lambda scaler, optimizer: scaler.unscale_(optimizer),
        lambda loss_of: loss_of(whole(X), TARGET).backward(),
    )
    expected = {n: p.detach() for n, p in whole.named_parameters()}

    def rank(stages):
        own, data = copy.deepcopy(net), stages.mesh.data_size
        made = pipeline(own, stages, X[:1], cuts=["last"])
        at = stages.mesh.data_index * 4 // data
        rows = slice(at, at + 4 // data)
        found = train(own, made.unscale_, partial(made.step, X[rows], TARGET[rows]))
        made.gather()
        assert found == scales
        found = {n: p.detach() for n, p in own.named_parameters()}
        assert_equal(found, expected, dict.fromkeys(expected, 1e-9))

    on_stages(list(meshes), rank)


def test_a_scaler_whose_stages_decide_by_themselves_is_refused():
    """In the step after the one in which one stage alone has seen an overflow."""
    net = initialized(Between())

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        own.first.bias.register_hook(lambda g: g * torch.inf)
        made.step(X, TARGET, lambda y, t: scaler.scale(F.mse_loss(y, t)))
        scaler.step(optimizer)  # without made.unscale_
        scaler.update()
        with pytest.raises(UsageError, match="unscale_"):
            made.step(X, TARGET, lambda y, t: scaler.scale(F.mse_loss(y, t)))

    on_stages([ONE, ONE], rank)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_with_a_frozen_stage(enabled):
    net = initialized(Between())
    net.last.requires_grad_(False)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"])
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        made.step(X, TARGET, lambda y, t: scaler.scale(F.mse_loss(y, t)))
        made.unscale_(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        made.gather()
        return own.first.weight.detach()

    whole = copy.deepcopy(net)
    F.mse_loss(whole(X), TARGET).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for found in on_stages([ONE, ONE], rank):
        torch.testing.assert_close(found, whole.first.weight.detach(), rtol=1e-9, atol=0)
