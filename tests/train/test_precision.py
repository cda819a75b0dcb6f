"""Tests of mixed precision on a split sample: the dtypes of messages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import parallelize
from pydist.comm import LocalTransport
from support.equivalence import on_ranks, randn
from support.networks.small import initialized

X, TARGET = randn(2, 2, 12, 6, 5).float(), randn(2, 3, seed=1).float()


def network() -> nn.Module:
    """Returns a network with two halos of activations, one normalized, and statistics."""
    return initialized(
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
    """The step equals the one-device step within the precision of the dtype."""
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
