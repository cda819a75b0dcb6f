"""Tests of networks whose later passes make other calls than the planned one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pydist.errors import NotSupported
from pydist.stages import pipeline
from support.equivalence import randint, randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, on_stages


class Branches(nn.Module):
    """Layers in a row, and calls that `extra` and training switch on."""

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.extra = extra
        self.a, self.b, self.c = (nn.Conv3d(c, 4, 3, padding=1) for c in (2, 4, 4))
        self.aux, self.head = nn.Conv3d(4, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.extra == "layer":
            x = x + self.aux(x)
        if self.extra == "training" and self.training:
            x = x * 2 - x
        x = torch.tanh(self.b(x))
        if self.extra == "again":
            x = torch.tanh(self.c(x))
            x = x + self.b(x)
        return self.head(torch.tanh(self.c(x)).mean((2, 3, 4)))


class SizedUNet(nn.Module):
    """U-Net that pads where an extent is odd, one call more."""

    def __init__(self) -> None:
        super().__init__()
        self.e1, self.e2, self.mid = (
            nn.Conv2d(i, o, 3, padding=1) for i, o in ((1, 4), (4, 8), (8, 8))
        )
        self.d2, self.d1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.e1(x))
        second = F.relu(self.e2(F.max_pool2d(first, 2)))
        up = self._up(F.relu(self.mid(F.max_pool2d(second, 2))), second)
        return self.d1(self._up(F.relu(self.d2(up)), first))

    def _up(self, x: Tensor, skip: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2)
        if x.shape[2:] != skip.shape[2:]:
            x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]))
        return torch.cat([x, skip], 1)


def trained(model, step, batches, change):
    """Returns the losses of steps with momentum, with `change(model, i)` before each."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), []
    for i, (x, target) in enumerate(batches):
        change(model, i)
        found.append(float(step(x, target)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare(model, meshes, batches, loss, change=lambda model, i: None, **options):
    """Compares losses and evaluations of a run in stages with one device."""
    one = copy.deepcopy(model)

    def alone(x, target):
        value = loss(one(x), target)
        value.backward()
        return value.detach()

    expected = trained(one, alone, batches, change)
    one.eval()
    with torch.no_grad():
        output = one(batches[0][0])

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, batches[0][0], **options)
        got = trained(mine, lambda x, t: made.step(x, t, loss), batches, change)
        mine.eval()
        y = made(batches[0][0])
        return got, None if y is None else getattr(y, "full_tensor", lambda: y)()

    for losses, y in on_stages(meshes, rank):
        assert losses == pytest.approx(expected, rel=1e-12)
        if y is not None:
            torch.testing.assert_close(y, output, rtol=1e-10, atol=1e-12)


BATCHES = [(randn(4, 2, 4, 4, 4, seed=i), randn(4, 3, seed=i)) for i in range(5)]
OPTIONS = [
    {"balance": "memory"},
    {"cuts": ["b"]},
    {"cuts": ["c"]},
    {"balance": "memory", "micro_batches": 2, "recompute": True},
]


@pytest.mark.parametrize("extra", ["layer", "training"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("meshes", [[ONE] * 2, [DEEP, ONE]], ids=str)
def test_a_layer_stays_where_it_was_trained(meshes, options, extra):
    def change(model, i):
        model.extra = extra if i >= 2 else ""

    compare(initialized(Branches()), meshes, BATCHES, F.mse_loss, change, **options)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("balance", ["time", "memory"])
def test_a_unet_that_pads_some_samples(stages, balance):
    sizes = [(16, 16), (16, 16), (18, 17), (16, 16), (18, 17)]
    batches = [(randn(4, 1, *s, seed=i), randint(2, 4, *s, seed=i)) for i, s in enumerate(sizes)]
    compare(initialized(SizedUNet()), [ONE] * stages, batches, F.cross_entropy, balance=balance)


@pytest.mark.parametrize("cuts", [["b"], ["c"]])
def test_calls_that_evaluation_leaves_out(cuts):
    """Also of weights that are computed from parameters, which evaluation has no graph of."""
    model = Branches("training")
    model.b = parametrizations.weight_norm(model.b)
    compare(initialized(model), [ONE] * 2, BATCHES, F.mse_loss, cuts=cuts)


def test_a_layer_that_a_later_stage_would_need():
    model = initialized(Branches())

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, BATCHES[0][0], cuts=["c"])
        made.step(*BATCHES[0], F.mse_loss)
        mine.extra = "again"
        with pytest.raises(NotSupported, match=r"conv3d \(call 1 in b\) comes after .* stage 1 "):
            made.step(*BATCHES[1], F.mse_loss)

    on_stages([ONE] * 2, rank)


class Chain(nn.Module):
    """Linear layers in a row, which `calls` may change, by the step or the mode."""

    def __init__(self, calls) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.weights = nn.ParameterList(nn.Parameter(randn(6, 6, seed=i) / 2) for i in range(3))
        self.gates = nn.ParameterList(nn.Parameter(randn(1, seed=i)[0]) for i in range(3))
        self.register_buffer("mean", torch.full((6,), 0.3))
        self.calls, self.step = calls, 9  # while stages are planned

    def forward(self, x: Tensor) -> Tensor:
        return self.calls(self, x)


def left_out(block):
    def calls(net, x):
        for i, layer in enumerate(net.layers):
            x = x if (i, net.step) == (block, 0) and net.training else x + torch.tanh(layer(x))
        return x

    return calls


def repeated(net, x):
    for _ in range((2, 4, 3, 1)[net.step % 4]):
        x = torch.tanh(net.layers[0](x))
    return net.layers[1](x)


def scaled(net, x):
    x = x * 2 - x if net.training else x
    for w in net.weights:
        x = torch.tanh(F.linear(x, F.normalize(w, dim=1) * 0.5))
    return x


def packed(net, x):
    x = x * 2 - x if net.training else x
    for w in net.weights:
        x = torch.tanh(F.linear(torch.tanh(F.linear(x, w.t())), w.detach()[:, :6]))
    return x


def gated(net, x):
    x = x * 2 - x if net.training else x
    for layer, gate in zip(net.layers, net.gates, strict=False):
        x = x + torch.sigmoid(gate) * torch.tanh(layer(x)) * gate.exp()
    return x


def auxiliary(net, x):
    x = net.layers[0](x)
    y = net.layers[1](x) if net.training else 0
    return y + F.linear(net.layers[2](x), F.normalize(net.weights[0], dim=1))


def denormalized(net, x):
    x = net.layers[2](torch.tanh(net.layers[0](x - net.mean)))
    return x if net.training else x + net.mean


def with_constant(net, x):
    x = net.layers[0](x)
    if not net.training or 1 < net.step < 9:
        x = x * torch.linspace(0.9, 1.1, 6, dtype=x.dtype)
    return net.layers[2](torch.tanh(net.layers[1](x)))


def two_heads(net, x):
    return net.layers[2 + net.step % 2](torch.tanh(net.layers[1](torch.tanh(net.layers[0](x)))))


def dropped_before_a_buffer(net, x):
    x = net.layers[0](x)
    x = x if net.step in (2, 3, 4) else net.layers[1](x)
    return net.layers[3](torch.tanh(net.layers[2](x * net.mean)))


def new_buffers(net, x):
    x = torch.tanh(net.layers[0](x))
    for i in range(12):
        x = x * torch.full((6,), 1 + i / 1000, dtype=x.dtype)
    x = torch.tanh(net.layers[2](x)) * net.mean
    if net.training:
        net.mean = net.mean * 0.99
    return x


def viewed_in_place(net, x):
    x = net.layers[0](x)
    x.unsqueeze_(1)
    x = torch.tanh(net.layers[2](x) * net.weights[0]).mean(1)
    x.t_()
    return net.layers[3](x.clone().t())


CHAINS = {
    "block 1 left out": (left_out(1), {"cuts": ["layers.2"]}),
    "block 3 left out": (left_out(3), {"cuts": ["layers.3"]}),
    "repeated": (repeated, {"cuts": ["layers.1"]}),
    "scaled": (scaled, {}),
    "packed": (packed, {}),
    "gated": (gated, {}),
    "auxiliary head": (auxiliary, {"cuts": ["layers.2"]}),
    "constant buffer": (denormalized, {"cuts": ["layers.2"]}),
    "constant": (with_constant, {"cuts": ["layers.2"]}),
    "two heads, gems": (
        two_heads, {"cuts": ["layers.1"], "schedule": "gems", "micro_batches": 2}
    ),
    "recomputed": (
        dropped_before_a_buffer, {"cuts": ["layers.2"], "recompute": True, "micro_batches": 2}
    ),
    "views in place": (viewed_in_place, {"cuts": ["layers.2"], "micro_batches": 2}),
    "new buffers": (new_buffers, {"cuts": ["layers.2"]}),
}  # fmt: skip


@pytest.mark.parametrize(("calls", "options"), CHAINS.values(), ids=CHAINS)
def test_chains_whose_calls_change(calls, options):
    batches = [(randn(4, 6, seed=i), randn(4, 6, seed=i + 9)) for i in range(5)]

    def change(model, step):
        model.step = step

    compare(Chain(calls).double(), [ONE] * 2, batches, F.mse_loss, change, **options)


def test_a_frozen_layer_is_the_same_on_all_meshes():
    def calls(net, x):
        x = net.layers[2](torch.tanh(net.layers[0](x)))
        return net.layers[0](x) if 1 < net.step < 9 else x

    def change(model, step):
        model.step = step

    model = Chain(calls).double()
    model.layers[0].requires_grad_(False)
    batches = [(randn(4, 6, seed=i), randn(4, 6, seed=i + 9)) for i in range(4)]
    compare(model, [ONE] * 2, batches, F.mse_loss, change, cuts=["layers.2"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("removed", ["1", "2"])
def test_stages_may_make_no_calls(removed, schedule):
    """Of three, the middle or the last one; the last one still computes the criterion."""
    batches = [(randn(4, 6, seed=i), randn(4, 6, seed=i + 9)) for i in range(4)]

    def change(model, step):
        if step == 1:
            setattr(model, removed, nn.Identity())

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Tanh()).double()
    options = {"cuts": ["1", "2"], "schedule": schedule, "micro_batches": 2}
    compare(model, [ONE] * 3, batches, F.mse_loss, change, **options)


def test_statistics_stay_on_a_mesh():
    """The first step makes other calls than were planned, and the norm runs on the first mesh."""

    def calls(net, x):
        x = net.layers[0](x)
        x = torch.tanh(x) if net.step else x
        return net.layers[1](torch.tanh(net.norm(x)))

    model = Chain(calls).double()
    model.norm, model.step = nn.BatchNorm1d(6).double(), 1
    batches = [(randn(4, 6, seed=i), randn(4, 6, seed=i + 9)) for i in range(4)]

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, batches[0][0], cuts=["Chain"])
        mine.step = 0
        made.step(*batches[0], F.mse_loss)
        mine.step = 1
        with pytest.raises(NotSupported, match="statistics have been trained on an earlier stage"):
            made.step(*batches[1], F.mse_loss)

    on_stages([ONE] * 2, rank)


def test_evaluation_after_gather_may_take_any_weight():
    def calls(net, x):
        x = net.layers[1](torch.tanh(net.layers[0](x)))
        return x if net.training else F.linear(x, net.layers[0].weight.t())

    model, x = Chain(calls).double(), randn(4, 6)
    alone = copy.deepcopy(model)
    F.mse_loss(alone(x), x).backward()
    torch.optim.SGD(alone.parameters(), 0.3).step()
    expected = alone.eval()(x)

    def rank(stages):
        mine = copy.deepcopy(model)
        made = pipeline(mine, stages, x, cuts=["layers.1"])
        made.step(x, x, F.mse_loss)
        torch.optim.SGD(mine.parameters(), 0.3).step()
        mine.eval()
        with pytest.raises(NotSupported, match=r"call pipe\.gather\(\) before evaluation"):
            made(x)
        made.gather()
        y = made(x)
        if y is not None:
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)

    on_stages([ONE] * 2, rank)


def test_a_layer_that_two_stages_use_from_the_first_step_on():
    compare(initialized(Branches("again")), [ONE] * 2, BATCHES, F.mse_loss, cuts=["c"])


@pytest.mark.parametrize("other", [None, "a", []], ids=str)
def test_a_comparison_with_what_is_no_tensor_is_false(other):
    class Compares(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x) if x == other else super().forward(x).tanh()

    model, x = initialized(Compares(3, 3)), randn(2, 3)
    expected = F.mse_loss(model(x), x).detach()

    def rank(stages):
        made = pipeline(copy.deepcopy(model), stages, x, balance="memory")
        torch.testing.assert_close(made.step(x, x, F.mse_loss), expected)

    on_stages([ONE] * 2, rank)
