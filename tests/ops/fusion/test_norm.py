"""In-place ReLUs, fused with the norm before them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import layout_for_sample, parallelize
from pydist.errors import UsageError
from pydist.ops.norm import norm, norm_common
from support.equivalence import assert_same, check_function, on_ranks, randn, shard
from support.equivalence.scripts import check_checkpointed
from support.fused import FORMATS, NORMS, ranks_see, with_relu

SPLIT = [[0, 2, 5], [0, 1, 4], None]
EMPTY = [[0, 2, 5], None, [0, 0, 3]]
SLOPES = [0.0, 0.3]


@pytest.fixture
def slopes(monkeypatch):
    """Records the negative slopes with which norms are written: 1 without a ReLU."""
    found = []

    def recording(out, x, transform):
        found.append(transform.negative_slope)
        apply(out, x, transform)

    apply = norm.apply
    monkeypatch.setattr(norm, "apply", recording)
    return found


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("points", [SPLIT, EMPTY], ids=["split", "some empty"])
@pytest.mark.parametrize("function", NORMS.values(), ids=NORMS)
def test_split_equals_whole_to_second_order(function, points, slope, memory_format, slopes):
    check_function(
        lambda x, w, b: with_relu(function(x, w, b), slope),
        randn(2, 4, 5, 4, 3).to(memory_format=memory_format) + 10,
        [randn(4, seed=1), randn(4, seed=2)],
        points,
        second_order=True,
    )
    assert set(slopes) == {slope}


@pytest.fixture
def large(monkeypatch):
    """Treats small tensors as large ones, for which pydist replaces torch's kernels."""
    monkeypatch.setattr(norm_common, "_WORTH_A_PASS", 0)


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("function", [NORMS["batch"], NORMS["instance"]])
def test_on_one_rank_to_second_order(function, slope, slopes, large):
    check_function(
        lambda x, w, b: with_relu(function(x, w, b), slope),
        randn(2, 4, 5, 4, 3),
        [randn(4, seed=1), randn(4, seed=2)],
        [None] * 3,
        second_order=True,
    )
    assert set(slopes) == {slope}


class Doubling(nn.Module):
    """Product in new memory."""

    def forward(self, x):
        return x * 2.0


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("kind", [nn.BatchNorm3d, nn.InstanceNorm3d])
def test_evaluation(kind, memory_format, slopes, large):
    x = (randn(2, 3, 6, 4, 4) + 5).to(memory_format=memory_format)
    norm = kind(3, affine=True, track_running_stats=True)
    model = nn.Sequential(Doubling(), norm, nn.ReLU(inplace=True)).double()
    model(x)
    with torch.no_grad():
        norm.weight.copy_(randn(3, seed=1))
        expected = model.eval()(x.clone())

    def rank(mesh):
        net, part = (
            parallelize(copy.deepcopy(model), mesh),
            shard(x, layout_for_sample(mesh, x.shape)),
        )
        with torch.no_grad():
            y = net(part).full_tensor()
        assert 0.0 in slopes
        return y, net(part).full_tensor().detach()

    for without_graph, with_graph in on_ranks((2, 1, 1), rank):
        assert_same(without_graph, expected)
        assert_same(with_graph, expected)


def test_evaluation_refuses_statistics_of_other_channels(large):
    mean, var = torch.ones(2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    with pytest.raises(UsageError, match="norm of 3 channels got a running mean of shape"):
        ranks_see(torch.no_grad()(lambda part: F.batch_norm(part, mean, var)), randn(2, 3, 6, 4, 4))


@pytest.mark.parametrize("out_of_place", [F.relu, F.leaky_relu, torch.relu])
def test_out_of_place_both_results_are_there(out_of_place, slopes):
    def both(x, w):
        y = F.batch_norm(x, None, None, w, training=True)
        return out_of_place(y) + y * y

    check_function(both, randn(2, 3, 5, 4, 3), [randn(3, seed=1)], SPLIT)
    assert set(slopes) == {1.0}


def normed(x):
    return F.batch_norm(x * 1.0, None, None, training=True)


def test_who_looks_in_between_sees_the_linear_result(slopes):
    x = randn(2, 3, 6, 4, 4)

    def look(part):
        y = normed(part)
        linear = y.full_tensor().detach().clone()
        return linear, F.relu_(y).full_tensor().detach()

    linear, y = ranks_see(look, x)
    assert_same(linear, normed(x))
    assert_same(y, normed(x).relu())
    assert set(slopes) == {1.0}


def test_a_hook_on_the_norm_gets_the_gradient_behind_the_relu():
    """The hook gets the norm's own gradient, not that of the fused pair."""
    x, grad = randn(2, 3, 6, 4, 4), randn(2, 3, 6, 4, 4, seed=1)

    def hooked(x, grad, whole):
        seen = []
        y = normed(x.requires_grad_())
        y.register_hook(lambda g: seen.append(whole(g)))
        F.relu_(y).backward(grad)
        return seen[0]

    def rank(mesh):
        parts = (shard(t, layout_for_sample(mesh, t.shape)) for t in (x, grad))
        return hooked(*parts, lambda g: g.full_tensor())

    expected = hooked(x.clone(), grad, lambda g: g)
    assert_same(on_ranks((2, 1, 1), rank)[0], expected)


def test_a_relu_without_graph_keeps_the_norms(slopes):
    """As in torch, the values change and the gradient is that of the norm alone."""
    x, grad = randn(2, 3, 6, 4, 4), randn(2, 3, 6, 4, 4, seed=1)

    def gradient(x, grad):
        y = normed(x.requires_grad_())
        with torch.no_grad():
            F.relu_(y)
        y.backward(grad)
        return x.grad

    def rank(mesh):
        parts = (shard(t, layout_for_sample(mesh, t.shape)) for t in (x, grad))
        return gradient(*parts).full_tensor()

    expected = gradient(x.clone(), grad)
    assert_same(on_ranks((2, 1, 1), rank)[0], expected)
    assert 0.0 not in slopes


def test_the_norms_node_is_where_it_is_without_fusing():
    """The node exchanges sums in backward, and its graph position sets the order of exchanges."""

    def nodes(part):
        y = F.relu_(normed(part.requires_grad_()))
        return y.to_local().grad_fn.name(), y.to_local().grad_fn.next_functions[0][0].name()

    first, second = ranks_see(nodes, randn(2, 3, 6, 4, 4))
    assert "Relu" in first
    assert "Normalize" in second


def test_where_values_differ_by_rounding_only_both_passes_agree_on_the_sign():
    """A constant channel is normalized to the rounding error of 0."""
    x = torch.full((1, 2, 6, 8, 8), 0.1) + torch.tensor([0.0, 1e-7]).view(1, 2, 1, 1, 1)
    x[0, 1, 0, 0, 0] = 0.2

    def gradient(part):
        part.requires_grad_()
        bias = torch.zeros(2, requires_grad=True)
        y = F.relu_(F.batch_norm(part * 1.0, None, None, None, bias, training=True))
        y.to_local().sum().backward()
        return (y.to_local() > 0).sum((0, 2, 3, 4)).float(), bias.grad

    def rank(mesh):
        positive, grad = gradient(shard(x, layout_for_sample(mesh, x.shape)))
        mesh.group(("depth",)).all_reduce(positive)
        return positive, grad

    for positive, grad in on_ranks((2, 1, 1), rank):
        assert_same(grad, positive)


def test_under_checkpointing():
    check_checkpointed(lambda: nn.Sequential(
        nn.Conv3d(3, 4, 3, bias=False), nn.BatchNorm3d(4), nn.ReLU(inplace=True),
        nn.Conv3d(4, 2, 3, bias=False), nn.InstanceNorm3d(2, affine=True),
        nn.LeakyReLU(0.1, inplace=True),
    ), randn(2, 3, 8, 6, 6))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_are_rounded_once(dtype):
    x = randn(2, 3, 8, 8, 8).to(dtype)
    expected = F.relu(normed(x.double()))
    found = ranks_see(lambda part: F.relu_(normed(part)).full_tensor().detach(), x)
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= torch.finfo(dtype).eps


def test_inference_tensors_are_written_at_once(slopes):
    x = randn(2, 3, 6, 4, 4)

    @torch.inference_mode()
    def relu(part):
        return F.relu_(normed(part * 1.0)).full_tensor()

    assert_same(ranks_see(relu, x), normed(x).relu())
    assert set(slopes) == {1.0}


def test_a_norm_without_graph_keeps_none_behind_a_relu_with_one():
    x = randn(2, 3, 6, 4, 4)

    def gradient(x):
        h = x.requires_grad_() * 1.0
        with torch.no_grad():
            y = normed(h)
        F.relu_(y)
        assert not y.requires_grad
        (y * y * h).sum().backward()
        return x.grad

    found = ranks_see(lambda part: gradient(part).full_tensor(), x)
    assert_same(found, gradient(x.clone()))


@pytest.mark.parametrize("alias", ["slice", "chunk", "detach", "contiguous"])
def test_memory_of_the_input_that_others_change(alias):
    """Without gradients, torch allows such changes."""
    x = randn(1, 4, 6, 4, 4)

    @torch.no_grad()
    def change(x):
        if alias == "contiguous":
            h, other = x.contiguous(), x
        elif alias == "detach":
            h, other = x.detach(), x
        else:
            h, other = x.chunk(2, 1) if alias == "chunk" else (x[:, :2], x[:, 2:])
        y = normed(h)
        F.relu_(other.add_(1.0))
        return F.relu_(y)

    found = ranks_see(lambda part: change(part).full_tensor(), x)
    assert_same(found, change(x.clone()))
