"""Tests of networks beyond chains: several networks, shared weights, skips, other precisions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pydist import parallelize
from support.equivalence import (
    Task,
    assert_equal,
    check_function,
    check_network,
    group_slice,
    on_ranks,
    randn,
    whole_of,
)
from support.equivalence.strategies import cuts
from support.networks.small import BATCH, SHAPE, initialized, small


def test_several_models_on_one_mesh():
    """One network trains through the other, and each by itself."""

    def losses(first, second, x):
        (F.mse_loss(first(x), randn(BATCH, 3)) * 2).backward()
        (F.mse_loss(second(x), randn(BATCH, 3)) + first(x).square().mean()).backward()
        return [p.grad for m in (first, second) for p in m.parameters()]

    expected = losses(small(), small(seed=1), randn(*SHAPE))

    def body(mesh):
        first, second = (parallelize(small(seed=s), mesh) for s in (0, 1))
        mine = group_slice(mesh, BATCH)
        (F.mse_loss(first(randn(*SHAPE)[mine]), randn(BATCH, 3)[mine]) * 2).backward()
        second_loss = F.mse_loss(second(randn(*SHAPE)[mine]), randn(BATCH, 3)[mine])
        (second_loss + first(randn(*SHAPE)[mine]).square().mean()).backward()
        return [p.grad for m in (first, second) for p in m.parameters()]

    for found in on_ranks((2, 1, 1), body, data=2):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_weight_used_on_shards_and_plain():
    """Its gradient mixes partial sums and replicated values."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(randn(3, 2, 3, 3, 3))
            self.scale = nn.Parameter(randn(3, 1, 1, 1, seed=1))

        def forward(self, x):
            y = F.conv3d(x, self.weight, padding=1) * self.scale
            plain = (
                self.weight.square().sum() + (self.scale * y.mean((2, 3, 4), keepdim=True)).sum()
            )
            gathered = whole_of(y).sin().sum()
            return y.square().mean() + plain * self.scale.sum() + gathered

    task = Task(Mixed(), randn(*SHAPE), torch.zeros(()), lambda y, _: y)

    def gradients(model, x):
        model(x).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    expected = gradients(copy.deepcopy(task.model), task.x)
    found = on_ranks((2, 2, 2), lambda mesh: gradients(parallelize(Mixed(), mesh), task.x))
    for each in found:
        assert_equal(each, expected)


def adversaries(generator, critic, mesh=None):
    """Trains an adversarial network for 3 steps; the generator's updates freeze the critic."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (generator, critic)]
    for step in range(3):
        noise, real = (randn(*SHAPE, seed=s + step) for s in (200, 300))
        if mesh is not None:
            noise, real = (t[group_slice(mesh, BATCH)] for t in (noise, real))
        critic.requires_grad_(True)
        optimizers[1].zero_grad()
        with torch.no_grad():
            fake = generator(noise)
        (critic(real).square().mean() + (critic(fake) - 1).square().mean()).backward()
        optimizers[1].step()
        critic.requires_grad_(False)
        optimizers[0].zero_grad()
        critic(generator(noise)).square().mean().backward()
        optimizers[0].step()
    return [*generator.parameters(), *critic.parameters()]


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 1)), (2, (1, 1, 2))])
def test_two_networks_that_train_against_each_other(data, spatial):
    def make():
        volumes = nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv3d(2, 2, 1))
        return initialized(volumes, seed=3), small()

    expected = adversaries(*make())
    for found in on_ranks(
        spatial, lambda mesh: adversaries(*(parallelize(m, mesh) for m in make()), mesh), data
    ):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


class Residual(nn.Module):
    """Network with skips, in-place sums, and sizes read from the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv3d(2, 2, 3, padding=1) for _ in range(3)])
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        total = 0.0
        for conv in self.convs:
            y = conv(x)
            y += x
            y = F.relu(y, inplace=True)
            total = total + y * self.gain
            x = torch.where(y > 0, y, 0.1 * x)
        n, c = x.shape[:2]
        pooled = total.view(n, c, -1).mean(-1) + total.amax((2, 3, 4)) / x[0, 0].numel()
        return torch.cat([pooled, pooled.sum(1, keepdim=True)], 1)


@pytest.mark.parametrize("spatial", [(2, 1, 1), (2, 2, 2), (8, 1, 1)])
def test_a_residual_network(spatial):
    check_network(
        Task(initialized(Residual()), randn(*SHAPE), randn(BATCH, 3, seed=1), F.mse_loss), spatial
    )


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[str, dict[str, int]]]:
    """Draws a list of layers that accept any extents."""
    layers = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["conv", "avg", "max", "norm", "skip", "act", "cat"]))
        k = draw(st.integers(1, 3))
        stride = draw(st.integers(1, 2))
        dilation = draw(st.integers(1, 2)) if kind == "conv" else 1
        layers.append((kind, {"k": k, "stride": stride, "dilation": dilation}))
    return layers


def run_chain(layers, x, weight, scale):
    """Applies a chain of layers; skips windows larger than the remaining input."""
    for kind, o in layers:
        reach = (o["k"] - 1) * o["dilation"] + 1
        if kind in ("conv", "avg", "max") and min(x.shape[2:]) < reach:
            continue
        if kind == "norm" and x[0, 0].numel() < 16:
            continue  # over few values a norm amplifies noise beyond any bound
        if kind == "conv":
            w = weight[:, : x.shape[1], : o["k"], : o["k"], : o["k"]]
            x = F.conv3d(x, w, scale, o["stride"], reach // 2, o["dilation"])
        elif kind == "avg":
            x = F.avg_pool3d(x, o["k"], o["stride"], o["k"] // 2, count_include_pad=False)
        elif kind == "max":
            x = F.max_pool3d(x, o["k"], o["stride"], o["k"] // 2)
        elif kind == "norm":
            x = F.batch_norm(torch.cat([x, x * x]), None, None, training=True)
        elif kind == "skip":
            x = x + x.mean((2, 3, 4), keepdim=True) * scale[0]
        elif kind == "cat":
            x = torch.cat([x, x.square()], 1)[:, :2]
        else:
            x = torch.tanh(x) * 2
    return x


@given(data=st.data(), layers=chains(), thin=st.booleans())
def test_any_chain_of_layers_under_any_split(data, layers, thin):
    """Backward and double backward combine placements, corrections and gathered halos."""
    extents = tuple(data.draw(st.integers(2, 7), "extent") for _ in range(3))
    check_function(
        lambda x, w, s: run_chain(layers, x, w, s),
        randn(1, 2, *extents),
        [randn(2, 2, 3, 3, 3, seed=1) / 5, randn(2, seed=2)],
        data.draw(cuts(extents)),
        second_order=True,
        keep_thin_blocks=thin,
    )


def test_parametrized_weights():
    """Weight norm computes the weights from other parameters, which are plain on every rank."""
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv3d(2, 3, 3, padding=1)),
        nn.LeakyReLU(inplace=True),
        nn.utils.parametrizations.weight_norm(nn.Conv3d(3, 2, 3, stride=2)),
        nn.Flatten(),
        nn.Linear(2 * 5 * 4 * 4, 3),
    )
    task = Task(initialized(model), randn(*SHAPE), randn(BATCH, 3, seed=1), F.mse_loss)
    check_network(task, (2, 2, 1))


@pytest.mark.parametrize("spatial", [(2, 1, 1), (2, 2, 2), (8, 1, 1)])
def test_autocast_computes_in_bfloat16_as_on_one_device(spatial):
    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(randn(*SHAPE).float())
        F.mse_loss(y.float(), randn(BATCH, 3).float()).backward()
        found = {n: p.grad.double() for n, p in model.named_parameters()}
        return y.dtype, found

    exact = small()
    F.mse_loss(exact(randn(*SHAPE)), randn(BATCH, 3)).backward()
    own_dtype, own = run(small().float())
    for dtype, found in on_ranks(spatial, lambda mesh: run(parallelize(small().float(), mesh))):
        assert dtype == own_dtype == torch.bfloat16
        for name, p in exact.named_parameters():
            rms = [float((g[name] - p.grad).square().mean().sqrt()) for g in (found, own)]
            assert rms[0] <= 3 * rms[1] + 1e-3 * float(p.grad.abs().max()), name
