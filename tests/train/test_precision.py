"""Mixed precision on a split sample: what travels in which type."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from equivalence import on_ranks, randn
from networks import initialised
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from pydist import parallelize
from pydist.comm.local import LocalTransport
from pydist.optim.momentum import start_momentum

X, TARGET = randn(2, 2, 12, 6, 5).float(), randn(2, 3, seed=1).float()


def network() -> nn.Module:
    """Halos of activations (twice, so that a normalised one travels too) and statistics."""
    return initialised(
        nn.Sequential(
            nn.Conv3d(2, 8, 3, padding=1),
            nn.BatchNorm3d(8),
            nn.LeakyReLU(),
            nn.Conv3d(8, 4, 3, padding=1),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        )
    ).float()


def train_step(model, dtype):
    with torch.autocast("cpu", dtype):
        loss = F.mse_loss(model(X), TARGET)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halos_travel_as_activations_and_statistics_in_single(dtype, monkeypatch):
    """And the step is that of one device, as close as the type is."""
    whole = copy.deepcopy(model := network())
    expected = train_step(whole, dtype)
    messages, sums = set(), []
    make_channel = LocalTransport._channel

    def watched_channel(self, sends, recvs, tag):
        messages.update(buffer.dtype for _, buffer in (*sends, *recvs))
        return make_channel(self, sends, recvs, tag)

    monkeypatch.setattr(LocalTransport, "_channel", watched_channel)

    def body(mesh):
        own = parallelize(copy.deepcopy(model), mesh)
        mesh.sample.watcher = sums.append
        loss = train_step(own, dtype)
        mesh.sample.watcher = None
        torch.testing.assert_close(loss, expected, rtol=0.02, atol=1e-3)
        for found, one in zip(own.parameters(), whole.parameters(), strict=True):
            scale = max(float(p.grad.abs().max()) for p in whole.parameters())
            assert float((found.grad - one.grad).abs().max()) < 0.03 * scale
            assert found.grad.dtype == torch.float32
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(
                getattr(own[1], name), getattr(whole[1], name), rtol=0.02, atol=0.01
            )

    on_ranks((2, 1, 1), body)
    assert messages == {dtype}, "a halo in another type would be twice the bytes, or lose bits"
    reduced = {t.dtype for t in sums if isinstance(t, torch.Tensor) and t.is_floating_point()}
    assert reduced, "statistics were exchanged"
    assert reduced <= {torch.float32, torch.float64}


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_the_first_step_leaves_no_trace_in_the_momentum(fused):
    """A fused step has taken memory for it by then, that others had before."""
    torch.full((4096,), 1e30)
    parameter = nn.Parameter(torch.ones(4096))
    optimizer = SGD([parameter], 0.5, momentum=0.5, fused=fused)
    if fused:
        start_momentum(optimizer)
    scaler = GradScaler("cpu", init_scale=2.0**100)
    for factor in (1e30, 1.0, 1.0):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.equal(parameter, torch.full((4096,), 1 - 0.5 * 1 - 0.5 * 1.5))
