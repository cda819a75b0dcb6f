"""Tests of `pydist.check`: its reference, and the networks that it examines or refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist.check import check, format_report
from pydist.errors import UsageError
from pydist.ops.conv import local_conv

SAMPLE = (1, 8, 8, 6)


class Net(nn.Module):
    """Network of two convolutions with a given function in between."""

    def __init__(self, between=lambda y: y, norm=None, middle: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, middle, 3, padding=1)
        self.norm = norm or nn.Identity()
        self.last = nn.Conv3d(middle, 2, 3, padding=1)
        self.between = between

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.between(self.conv(x)))))


def seeded(make):
    """Returns a check of a network and a sample that depend on a seed."""

    def run(seed: int, dtype=torch.float64):
        torch.manual_seed(seed)
        return check(make, SAMPLE, (2, 1, 1) if seed % 2 else (2, 2, 1), dtype=dtype, seed=seed)

    return run


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float64), (4, torch.float32)], ids=str)
def test_a_buffer_that_is_nothing_but_rounding_is_judged_by_its_size(seed, dtype):
    """The buffer is the running mean of zero-mean values."""
    norm = nn.Sequential(nn.InstanceNorm3d(1), nn.BatchNorm3d(1, affine=False))
    report = seeded(lambda: Net(norm=norm, middle=1))(seed, dtype)
    assert report.ok, report.failures
    (row,) = (r for r in format_report(report).splitlines() if r.startswith("norm.1.running_mean"))
    assert row.split() == ["norm.1.running_mean", "buffer", "noise", "–", "noise"]


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm3d(4), nn.GroupNorm(2, 4), nn.InstanceNorm3d(4), nn.LayerNorm([8, 8, 6])],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_are_compared_with_explicit_ones(norm):
    """Far from zero torch's fused norms are less exact than the split ones."""
    run = seeded(lambda: Net(lambda y: y + 1e4, norm))
    for seed in (3, 4):
        report = run(seed)
        assert report.ok, report.failures
        if not isinstance(norm, nn.LayerNorm):
            assert max(report.bounds.outputs.values()) > 1e-12, "torch's own is further off"


@pytest.mark.parametrize(("seed", "dtype"), [(1, torch.float64), (6, torch.float32)], ids=str)
def test_attention_unet(seed, dtype):
    """Its gates have one-number gradients, whose error one run on one device hardly shows."""
    networks = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(seed)
    report = check(
        lambda: networks.AttentionUnet(3, 1, 2, (4, 8, 8), (2, 2)),
        (1, 16, 8, 8), (2, 2, 1) if seed % 2 else (2, 1, 1), dtype=dtype, seed=seed,
    )  # fmt: skip
    assert report.ok, report.failures


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
def test_a_cast_of_the_networks_own_is_judged_by_its_type(monkeypatch, narrow):
    def gate(y):
        return y * y.to(narrow).square().mean((2, 3, 4), keepdim=True).to(y.dtype)

    report = check(lambda: Net(gate), SAMPLE)
    assert report.ok, report.failures
    assert f"the network itself casts to {narrow}" in format_report(report)
    assert report.bounds.outputs["conv"] <= 1e-11, "before the cast nothing is rounded"
    assert report.bounds.outputs["last"] > 1e-8
    right = local_conv.bias_gradient
    monkeypatch.setattr("pydist.ops.conv.correction.bias_gradient", lambda g: 0.5 * right(g))
    assert "gradient of last.bias" in check(lambda: Net(gate), SAMPLE).failures


def test_a_cast_without_which_the_network_does_not_run():
    class Single(nn.Conv3d):
        def forward(self, x):
            return super().forward(x.float())

    with pytest.raises(UsageError, match=r"casts to torch\.float32 by itself.*check it in float32"):
        check(lambda: Single(1, 2, 3), SAMPLE)
    assert check(lambda: Single(1, 2, 3), SAMPLE, dtype=torch.float32).ok


def test_complex_parameters_are_refused_by_name():
    class Phase(Net):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    with pytest.raises(UsageError, match=r"'phase' of this Phase holds torch\.complex64"):
        check(Phase, SAMPLE)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda y: y * torch.rand(4, 1, 1, 1).to(y.dtype), r"torch\.rand in module Net at .*\.py"),
        (lambda y: y + torch.rand_like(y), r"torch\.rand_like in module Net at .*\.py"),
        (lambda y: nn.functional.dropout(y, 0.1), r"torch\.nn\.functional\.dropout in module Net"),
        (lambda y: y * random.random(), "Python's generator"),
        (lambda y: y * np.random.rand(), "NumPy's generator"),
    ],
)
def test_random_numbers_of_the_process_are_refused_by_name(draw, name):
    with pytest.raises(UsageError, match=f"draws random numbers: {name}"):
        check(lambda: Net(draw), SAMPLE)


def test_of_a_chaotic_network_nothing_is_said():
    report = check(lambda: Net(lambda y: torch.sin(1e16 * y)), SAMPLE)
    assert not report.ok
    assert format_report(report).splitlines()[-1].startswith("INCONCLUSIVE: ")


def checkpointed(function):
    return lambda y: checkpoint(function, y, use_reentrant=False)


def test_checkpoints_are_examined():
    """So are explicit norms and refused calls that backward computes again."""

    class Again(nn.BatchNorm3d):
        def forward(self, y):
            return checkpoint(super().forward, y, use_reentrant=False)

    assert check(lambda: Net(norm=Again(4)), SAMPLE).ok
    report = check(lambda: Net(checkpointed(torch.tril)), SAMPLE)
    assert not report.failures
    (refusal,) = report.refusals
    assert "torch.tril" in refusal


def test_nested_checkpoints():
    inner = checkpointed(torch.tanh)
    assert check(lambda: Net(checkpointed(lambda y: inner(y) * 2)), SAMPLE).ok
