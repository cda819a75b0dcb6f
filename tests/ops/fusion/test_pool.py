"""In-place ReLUs between convolution and average pool, deferred to the pool."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import layout_for_sample
from pydist.ops.fusion import relu
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
from support.fused import FORMATS, with_relu

WEIGHT = randn(3, 2, 3, 3, 3, seed=5)


@pytest.fixture
def made(monkeypatch):
    """Records the slopes of ReLUs that ran separately from a pool."""
    found = []

    def recording(pending):
        if not pending.is_made:
            found.append(pending.negative_slope)
        complete(pending)

    complete = relu.DeferredRelu.complete
    monkeypatch.setattr(relu.DeferredRelu, "complete", recording)
    return found


@settings(max_examples=30)
@given(
    data=st.data(),
    slope=st.sampled_from([0.0, 0.01, 0.3]),
    pool=st.sampled_from([(3, 2, 1), (2, 2, 0), (3, 1, 1)]),
    stride=st.sampled_from([1, 2]),
    memory_format=st.sampled_from(FORMATS),
    second_order=st.booleans(),
)
def test_split_equals_whole(data, slope, pool, stride, memory_format, second_order):
    extents = [data.draw(st.integers(6, 9)) for _ in range(3)]
    check_function(
        lambda x, w, b: F.avg_pool3d(with_relu(F.conv3d(x, w, b, stride, 1), slope), *pool),
        randn(2, 2, *extents).to(memory_format=memory_format),
        [WEIGHT, randn(3, seed=6)],
        data.draw(cuts(extents)),
        second_order=second_order,
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
    )


def conv(x):
    return F.conv3d(x, WEIGHT, padding=1)


def net(x):
    return F.avg_pool3d(with_relu(conv(x), 0.3), 3, 2, 1)


def results(x, function, whole=lambda t: t):
    """Returns the full result and gradient of `function`."""
    y = function(x.requires_grad_())
    (y * y * y).sum().backward()
    return whole(y).detach(), whole(x.grad)


def check_on_ranks(x, function, grid=(2, 1, 1)):
    expected = results(x.clone(), function)

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        return results(part, function, lambda t: t.full_tensor())

    for found in on_ranks(grid, rank):
        assert_same(found, expected)


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (2, 2, 1)])
def test_the_relu_is_not_made(grid, made):
    check_on_ranks(randn(2, 2, 8, 8, 6), net, grid)
    assert made == []


# Other readers of the ReLU's result z, besides the pool.
def skip_after(x):
    z = with_relu(conv(x), 0.3)
    return F.avg_pool3d(z, 3, 2, 1) + F.max_pool3d(z, 3, 2, 1)


def skip_before(x):
    z = with_relu(conv(x), 0.3)
    return F.max_pool3d(z, 3, 2, 1) + F.avg_pool3d(z, 3, 2, 1)


def two_pools(x):
    z = with_relu(conv(x), 0.3)
    return F.avg_pool3d(z, 3, 2, 1) + F.avg_pool3d(z, 2, 2)


def hook_after(x):
    z = with_relu(conv(x), 0.3)
    y = F.avg_pool3d(z, 3, 2, 1)
    z.register_hook(lambda g: 2 * g)
    return y


def hook_before(x):
    z = with_relu(conv(x), 0.3)
    z.register_hook(lambda g: 2 * g)
    return F.avg_pool3d(z, 3, 2, 1)


def relu_alone(x):
    return with_relu(conv(x), 0.3)


def relu_of_a_constant(x):
    with torch.no_grad():
        z = with_relu(conv(x), 0.3)
    return F.avg_pool3d(z, 3, 2, 1) * F.avg_pool3d(x.sum(1, keepdim=True), 3, 2, 1)


def relu_without_graph(x):
    y = conv(x)
    with torch.no_grad():
        with_relu(y, 0.3)
    return F.avg_pool3d(y, 3, 2, 1)


def checkpointed_from_the_pool_on(x):
    z = with_relu(conv(x), 0.3)
    return checkpoint(lambda z: F.avg_pool3d(z, 3, 2, 1).square(), z, use_reentrant=False)


def offloaded(x):
    with torch.autograd.graph.save_on_cpu():
        return net(x)


OTHERS = [
    skip_after, skip_before, two_pools, hook_after, hook_before, relu_alone,
    relu_of_a_constant, relu_without_graph,
    checkpointed_from_the_pool_on, offloaded,
]  # fmt: skip


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("function", OTHERS)
def test_others_who_ask_for_the_relu(function, grid):
    check_on_ranks(randn(2, 2, 8, 8, 6), function, grid)


def test_who_looks_later_sees_the_relus_result():
    x = randn(2, 2, 8, 8, 6)

    def rank(mesh):
        z = with_relu(conv(shard(x, layout_for_sample(mesh, x.shape))), 0.3)
        y = F.avg_pool3d(z, 3, 2, 1)
        return z.full_tensor(), y.full_tensor()

    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, (with_relu(conv(x), 0.3), net(x)))


def test_a_gradient_of_the_relu_between_two_backwards():
    def gradients(x):
        z = with_relu(conv(x.requires_grad_()), 0.3)
        loss = F.avg_pool3d(z, 3, 2, 1).pow(3).sum()
        loss.backward(retain_graph=True)
        (of_z,) = torch.autograd.grad(loss, z, retain_graph=True)
        loss.backward()
        return x.grad, of_z

    x = randn(2, 2, 8, 8, 6)
    expected = gradients(x.clone())

    def rank(mesh):
        return [g.full_tensor() for g in gradients(shard(x, layout_for_sample(mesh, x.shape)))]

    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, list(expected))


def test_outputs_changed_in_place_after_the_pool_are_refused_as_torch_refuses_them():
    def rank(mesh):
        x = shard(randn(2, 2, 8, 8, 6), layout_for_sample(mesh, (2, 2, 8, 8, 6)))
        z = with_relu(conv(x.requires_grad_()), 0.3)
        y = F.avg_pool3d(z, 3, 2, 1)
        z.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    on_ranks((2, 1, 1), rank)


def test_under_checkpointing():
    check_checkpointed(lambda: nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.LeakyReLU(0.1, inplace=True), nn.AvgPool3d(3, 2, 1),
        nn.Conv3d(4, 2, 3, padding=1), nn.ReLU(inplace=True), nn.AvgPool3d(2),
    ), randn(2, 2, 8, 6, 6))  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    x = randn(2, 2, 8, 8, 6)

    def rank(mesh):
        with mode():
            part = shard(x, layout_for_sample(mesh, x.shape))
            twice = with_relu(with_relu(conv(part), 0.3), 0.5)  # the second can't be deferred
            return net(part).full_tensor(), F.avg_pool3d(twice, 3, 2, 1).full_tensor()

    expected = net(x), F.avg_pool3d(with_relu(with_relu(conv(x), 0.3), 0.5), 3, 2, 1)
    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, expected)


def test_training_after_an_evaluation_in_inference_mode():
    """Buffers of messages that the evaluation has made are changed in place."""
    x = randn(2, 2, 8, 8, 6)

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        with torch.inference_mode():
            net(part)
        return net(part.requires_grad_()).full_tensor()

    for found in on_ranks((2, 1, 1), rank):
        assert_same([found], [net(x)])


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(dtype, memory_format):
    x = randn(2, 3, 9, 8, 21).to(dtype).to(memory_format=memory_format)
    grad, points = randn(2, 3, 5, 4, 11).to(dtype), ([0, 5, 9], None, None)

    def both(x, grad, wait=lambda y: y):
        y = F.avg_pool3d(with_relu(wait(x * 1.0), 0.25), 3, 2, 1)
        return y, *torch.autograd.grad((y * grad).sum(), x)

    def waiting(y):
        y._deferred = relu.ConvOutputs(y._shard)  # as a convolution leaves them
        return y

    def rank(mesh):
        part = shard(x, layout_at(mesh, x.shape, points)).requires_grad_()
        return [t.full_tensor().detach() for t in both(part, grad, waiting)]

    expected = both(x.double().requires_grad_(), grad.double())
    for found in on_ranks(spatial_of(points), rank):
        for narrow, wanted in zip(found, expected, strict=True):
            assert narrow.dtype == dtype
            error = (narrow.double() - wanted).abs().max() / wanted.abs().max()
            assert error <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_second_order_behind_a_norm_and_a_prelu(slope):
    def function(x, weight, factor):
        y = F.conv3d(F.prelu(F.instance_norm(x), factor), weight, padding=1)
        return F.avg_pool3d(with_relu(y, slope), 2, 1).square() * factor.sum()

    parameters = [randn(3, 3, 3, 3, 3, seed=2), randn(3, seed=4)]
    points = ([0, 3, 5, 7], None, None)
    check_function(function, randn(2, 3, 7, 6, 5), parameters, points, second_order=True)


@pytest.mark.parametrize("pool", [F.avg_pool3d, F.max_pool3d])
def test_a_pool_of_a_channels_last_tensor_may_be_changed_in_place(pool):
    check_function(
        lambda x: F.leaky_relu_(pool(x, 3, 1, 1), 0.2),
        randn(2, 3, 7, 4, 4).to(memory_format=torch.channels_last_3d),
        points=[[0, 3, 7], None, None],
    )
