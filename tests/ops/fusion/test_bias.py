"""A bias that is added after the convolution, with the ReLU: what CUDA does, run on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pydist import layout_for_sample
from pydist.ops.conv import conv, correction
from pydist.ops.fusion import relu
from support.equivalence import assert_same, check_function, on_ranks, randn, shard

POINTS = [[[0, 3, 7], [0, 4, 6], None], [None] * 3]
WEIGHT, BIAS = randn(3, 2, 3, 3, 3, seed=1), randn(3, seed=2)


@pytest.fixture
def late(monkeypatch):
    """The slopes with which biases were added after convolutions."""
    found = []

    def recording(y, added, slope):
        if added is not None:
            found.append(slope)
        finish_(y, added, slope)

    finish_ = relu.finish_
    for module in (conv, correction):
        monkeypatch.setattr(module, "deferred_bias", lambda x, b: None if b is None else b.detach())
    monkeypatch.setattr(relu, "finish_", recording)
    return found


def act(y, slope):
    return y if slope == 1 else F.leaky_relu(y, slope, inplace=True)


USES = {
    "alone": lambda y: y * 1.0,
    "a pool that may be fused": lambda y: F.avg_pool3d(y, 3, 2, 1),
    "a pool that may not": lambda y: F.max_pool3d(y, 3, 2, 1),
    "two who ask": lambda y: y * F.relu(y),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("points", POINTS, ids=["split", "whole"])
@pytest.mark.parametrize("slope", [1.0, 0.25])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_split_equals_whole(use, slope, points, memory_format, late):
    check_function(
        lambda x, w, b: use(act(F.conv3d(x, w, b, padding=1), slope)),
        randn(2, 2, 7, 6, 5).to(memory_format=memory_format),
        [WEIGHT, BIAS],
        points,
        second_order=True,
    )
    assert late
    assert set(late) <= {slope, 1.0}


def test_bias_and_relu_are_one_pass(late):
    x = randn(2, 2, 8, 6, 5)

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        return act(F.conv3d(part, WEIGHT, BIAS, padding=1), 0.25).full_tensor()

    expected = act(F.conv3d(x, WEIGHT, BIAS, padding=1), 0.25)
    for grid in ((1, 1, 1), (2, 1, 1)):
        late.clear()
        for found in on_ranks(grid, rank):
            assert_same(found, expected)
        assert late == [0.25] * grid[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_outputs_are_rounded_once(dtype):
    y = randn(2, 3, 4, 5, 6).to(dtype)
    expected = F.leaky_relu(y.double() + BIAS.to(dtype).double().view(3, 1, 1, 1), 0.25)
    apart = y[..., ::2].clone()[..., ::2]  # not dense
    also = F.leaky_relu(apart + BIAS.to(dtype).view(3, 1, 1, 1), 0.25)
    for given, wanted in ((y, expected), (apart, also.double())):
        relu.finish_(given, BIAS.to(dtype), 0.25)
        assert (given.double() - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()
