"""In-place ReLUs after a convolution: deferred until their result is used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pydist import layout_for_sample, parallelize
from support.equivalence import (
    assert_same,
    check_function,
    layout_at,
    on_ranks,
    randn,
    shard,
    spatial_of,
)
from support.equivalence.scripts import check_checkpointed
from support.equivalence.strategies import cuts
from support.fused import with_relu

# With slope 1 there is nothing to defer.
SLOPES = [0.0, 0.01, 0.3, 1.0]


@settings(max_examples=60)
@given(
    data=st.data(),
    slope=st.sampled_from(SLOPES),
    kernel=st.tuples(*[st.sampled_from([1, 3, 3, 5])] * 3),
    stride=st.tuples(*[st.sampled_from([1, 1, 2])] * 3),
    dilation=st.tuples(*[st.sampled_from([1, 1, 2])] * 3),
    second_order=st.booleans(),
)
def test_split_equals_whole(data, slope, kernel, stride, dilation, second_order):
    extents = [max(4, d * (k - 1) + 1) for k, d in zip(kernel, dilation, strict=True)]
    extents = [n + data.draw(st.integers(0, 4)) for n in extents]
    padding = [d * (k // 2) for k, d in zip(kernel, dilation, strict=True)]

    def two_layers(x, first, bias, second):
        y = with_relu(F.conv3d(x, first, bias, stride, padding, dilation), slope)
        return with_relu(F.conv3d(y, second, None, 1, 1), slope)

    weights = [randn(3, 2, *kernel, seed=1), randn(3, seed=2), randn(2, 3, 3, 3, 3, seed=3)]
    points = data.draw(cuts(extents))
    check_function(two_layers, randn(1, 2, *extents), weights, points, second_order=second_order)


@pytest.mark.parametrize("slope", [0.0, 0.25])
@pytest.mark.parametrize(
    "points",
    [[[0, 4, 8], None, None], [[0, 3, 8], [0, 5, 8], None], [[0, 4, 8]] * 3,
     [[0, 1, 2, 8], None, [0, 4, 8]]],
    ids=["depth", "uneven", "three dims", "thin"],
)  # fmt: skip
def test_same_bits_as_one_after_the_other(points, slope):
    x, weight, bias = randn(2, 3, 8, 8, 8), randn(4, 3, 3, 3, 3, seed=1), randn(4, seed=2)

    def rank(mesh):
        part = shard(x, layout_at(mesh, x.shape, points))
        plain = F.conv3d(part, weight, bias, padding=1)
        expected = F.leaky_relu(plain.to_local().detach(), slope)
        found = with_relu(F.conv3d(part, weight, bias, padding=1), slope)
        torch.testing.assert_close(found.to_local().detach(), expected, rtol=0, atol=0)

    on_ranks(spatial_of(points), rank, keep_thin_blocks=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(dtype):
    x, weight = randn(1, 4, 8, 8, 8).to(dtype), randn(4, 4, 3, 3, 3, seed=1).to(dtype)
    expected = F.relu(F.conv3d(x.double(), weight.double(), padding=1))

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        return F.relu(F.conv3d(part, weight, padding=1), inplace=True).full_tensor().detach()

    found = on_ranks((2, 1, 1), rank)[0]
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= 4 * torch.finfo(dtype).eps


def test_infinities_and_nan_as_torch_has_them():
    weight = torch.zeros(1, 1, 3, 1, 1, dtype=torch.float64)
    weight[0, 0, 0] = weight[0, 0, 2] = 1.0
    x = torch.ones(1, 1, 4, 2, 2, dtype=torch.float64)
    x[0, 0, 1, 0], x[0, 0, 2, 1] = -torch.inf, torch.nan

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        y = F.conv3d(part, weight, padding=(1, 0, 0))
        return F.relu(y, inplace=True).full_tensor().detach()

    expected = F.relu(F.conv3d(x, weight, padding=(1, 0, 0)))
    assert_same(on_ranks((2, 1, 1), rank)[0], expected)


def test_who_looks_in_between_sees_the_linear_result():
    x, weight = randn(1, 2, 6, 6, 6), randn(2, 2, 3, 3, 3, seed=1)
    linear = F.conv3d(x, weight, padding=1)

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        conv = nn.Conv3d(2, 2, 3, padding=1, bias=False).double()
        seen = []
        conv.register_forward_hook(lambda *a: seen.append(a[2].full_tensor().detach().clone()))
        conv.weight.data.copy_(weight)
        net = parallelize(nn.Sequential(conv, nn.ReLU(inplace=True)), mesh)
        y = net(part)
        return seen[0], y.full_tensor().detach()

    for seen, y in on_ranks((2, 1, 1), rank):
        assert_same(seen, linear)
        assert_same(y, linear.relu())


def test_under_checkpointing():
    check_checkpointed(lambda: nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv3d(3, 2, 3, padding=1), nn.LeakyReLU(0.1, inplace=True),
        nn.Conv3d(2, 2, 3, padding=1),
    ), randn(1, 2, 8, 6, 6))  # fmt: skip


def test_second_order_in_place_where_a_rank_has_nothing():
    def function(x, weight):
        return F.batch_norm(F.relu_(F.conv3d(x, weight, padding=1)), None, None, training=True)

    points = ([0, 3, 3, 7], None, None)
    weight = randn(3, 3, 3, 3, 3, seed=2)
    check_function(function, randn(2, 3, 7, 6, 5), [weight], points, second_order=True)
