"""Split convolution equals the one-device run: forward, every gradient, double backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pydist.errors import NotSupported, UsageError
from pydist.exchange.redistribution import BoxGatherer
from support.equivalence import check_function, layout_at, on_ranks, randn, shard
from support.equivalence.strategies import WindowCase, cuts, windows

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
# For an even kernel, torch's "same" pads a copy and warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

channels = st.integers(1, 2)


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
def test_any_window_any_split(dims, data):
    case: WindowCase = data.draw(windows(dims=dims))
    groups, per_group, out_per_group = (data.draw(channels, label=n) for n in ("g", "in", "out"))
    x = randn(data.draw(channels, label="N"), groups * per_group, *case.extents)
    weight = randn(groups * out_per_group, per_group, *case.kernel, seed=1)
    bias = [randn(groups * out_per_group, seed=2)] if data.draw(st.booleans(), "bias") else []

    def conv(x, weight, bias=None):
        return CONV[dims](x, weight, bias, case.stride, case.padding, case.dilation, groups)

    check_function(
        conv,
        x,
        [weight, *bias],
        case.points,
        second_order=data.draw(st.booleans(), "second order"),
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
        channel=data.draw(st.sampled_from((1, 1, 2, 3)), "channel"),
    )


@pytest.mark.parametrize("padding", ["same", "valid"])
@given(data=st.data(), kernel=st.tuples(*[st.integers(1, 4)] * 3), dilation=st.integers(1, 2))
def test_padding_by_name(padding, data, kernel, dilation):
    extents = [(k - 1) * dilation + 1 + data.draw(st.integers(0, 3)) for k in kernel]
    check_function(
        lambda x, w: F.conv3d(x, w, padding=padding, dilation=dilation),
        randn(1, 1, *extents),
        [randn(2, 1, *kernel, seed=1)],
        data.draw(cuts(extents)),
    )


# Blocks that line up with the stride use correction; the others use gathering.
LINED_UP = {
    "k3": ({"padding": 1}, 3, [[0, 4, 8], None, None]),
    "k5": ({"padding": 2}, 5, [[0, 4, 8], None, None]),
    "halo wider than a block": ({"padding": 2}, 5, [[0, 1, 2, 3, 4, 8], None, None]),
    "stride 2": ({"padding": 1, "stride": 2}, 3, [[0, 4, 8], [0, 2, 4, 8], None]),
    "dilation 2": ({"padding": 2, "dilation": 2}, 3, [[0, 4, 8], None, [0, 3, 8]]),
    "three dims": ({"padding": 1}, 3, [[0, 4, 8], [0, 3, 8], [0, 5, 8]]),
    "offset and stride do not line up": ({"padding": 1, "stride": 2}, 3, [[0, 3, 8], None, None]),
    "an offset that does not line up and shapes that do": (
        {"padding": 1, "stride": 2},
        5,
        [[0, 3, 8], None, None],
    ),
    "not padded": ({}, 3, [[0, 4, 8], None, None]),
    "even kernel": ({"padding": 1}, 2, [[0, 4, 8], None, None]),
    "one voxel a rank": ({"padding": 1}, 3, [list(range(9)), None, None]),
    "empty first and last": ({"padding": 1}, 3, [[0, 0, 8, 8], None, None]),
    "all on one of 2x2x2": ({"padding": 1}, 3, [[0, 0, 8], [0, 8, 8], [0, 0, 8]]),
}


@pytest.mark.parametrize("second_order", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(("options", "kernel", "points"), LINED_UP.values(), ids=LINED_UP)
def test_geometries_by_name(options, kernel, points, second_order):
    check_function(
        lambda x, w, b: F.conv3d(x, w, b, **options),
        randn(2, 2, 8, 8, 8),
        [randn(4, 2, kernel, kernel, kernel, seed=1), randn(4, seed=2)],
        points,
        second_order=second_order,
    )


@pytest.mark.parametrize("name", ["k5", "halo wider than a block", "stride 2", "dilation 2"])
def test_images_are_not_gathered_where_blocks_line_up(name, monkeypatch):
    def never(*_, **__):
        raise AssertionError("inputs were gathered")

    monkeypatch.setattr(BoxGatherer, "__call__", never)
    options, kernel, points = LINED_UP[name]
    check_function(
        lambda x, w, b: F.conv2d(x, w, b, groups=2, **options),
        randn(2, 4, 8, 8),
        [randn(4, 2, kernel, kernel, seed=1), randn(4, seed=2)],
        [points[0], [0, 2, 8]],
    )


def test_groups_with_bias_over_two_dims():
    check_function(
        lambda x, w, b: F.conv3d(x, w, b, padding=1, groups=4),
        randn(1, 4, 6, 6, 3),
        [randn(8, 1, 3, 3, 3, seed=1), randn(8, seed=2)],
        [[0, 2, 6], [0, 3, 6], None],
        second_order=True,
    )


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen):
    """Backward skips each part of the correction independently."""
    whole = dict(
        input=randn(1, 2, 6, 4, 4), weight=randn(2, 2, 3, 3, 3, seed=1), bias=randn(2, seed=2)
    )

    def gradients(leaves):
        for name, leaf in leaves.items():
            leaf.requires_grad_(name != frozen)
        F.conv3d(**leaves, padding=1).square().sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    def split(mesh):
        own = {name: t.clone() for name, t in whole.items()}
        own["input"] = shard(
            whole["input"], layout_at(mesh, (1, 2, 6, 4, 4), [[0, 2, 6]] + [None] * 2)
        )
        found = gradients(own)
        if frozen != "input":
            found["input"] = found["input"].full_tensor()
        for name in {"weight", "bias"} - {frozen}:
            mesh.sample.all_reduce(found[name])
            found[name] /= mesh.sample_size
        return found

    expected = gradients({name: t.clone() for name, t in whole.items()})
    for found in on_ranks((2, 1, 1), split):
        assert found.pop(frozen) is None
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


def test_channels_last_input_and_weight():
    check_function(
        lambda x, w: F.conv3d(
            x.contiguous(memory_format=torch.channels_last_3d) if x.is_leaf else x, w, padding=1
        ),
        randn(2, 3, 6, 4, 4),
        [randn(2, 3, 3, 3, 3).contiguous(memory_format=torch.channels_last_3d)],
        [[0, 2, 6], None, None],
    )


def test_bfloat16_keeps_its_dtype_and_accuracy():
    x, w = randn(1, 4, 6, 6, 6), randn(4, 4, 3, 3, 3, seed=1)
    x16, w16 = x.bfloat16(), w.bfloat16()
    exact = F.conv3d(x16.double(), w16.double(), padding=1)
    own = (F.conv3d(x16, w16, padding=1).double() - exact).square().mean().sqrt()

    def split(mesh):
        layout = layout_at(mesh, x.shape, [[0, 3, 6], None, None])
        return F.conv3d(shard(x16, layout), w16, padding=1).full_tensor()

    for y in on_ranks((2, 1, 1), split):
        assert y.dtype == torch.bfloat16
        assert (y.double() - exact).square().mean().sqrt() <= 2 * own


REFUSED = {
    "no batch dim": (lambda x, w: F.conv3d(x[0], w), NotSupported, "N, C"),
    "complex": (lambda x, w: F.conv3d(torch.complex(x, x), w), NotSupported, "complex numbers"),
    "plain input": (lambda x, w: F.conv3d(w, x), NotSupported, "the input is plain"),
    "window larger than the input": (
        lambda x, w: F.conv3d(x, w.repeat(1, 1, 3, 1, 1)), UsageError, "does not fit"
    ),
    "negative padding": (
        lambda x, w: F.conv3d(x, w[..., :1, :1, :1], padding=(-1, 0, 0)), RuntimeError, "negative"
    ),
    "the same extents with a stride": (
        lambda x, w: F.conv3d(x, w, padding="same", stride=(1, 2, 1)), RuntimeError, "strided"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_what_is_expected(call, kind, message):
    def body(mesh):
        x = shard(randn(1, 1, 4, 4, 4), layout_at(mesh, (1, 1, 4, 4, 4), [[0, 2, 4], None, None]))
        with pytest.raises(kind, match=message):
            call(x, randn(1, 1, 3, 3, 3))

    on_ranks((2, 1, 1), body)


def test_channels_cut_over_a_spatial_axis():
    x, *parameters = randn(1, 4, 5), randn(4, 4, 3, seed=1), randn(4, seed=2)
    check_function(F.conv1d, x, parameters, [[0, 1, 4], [0, 5]], second_order=True)


@pytest.mark.parametrize("call", [F.conv1d, F.conv_transpose1d])
def test_an_empty_shard_has_the_undefined_second_derivatives_of_others(call):
    """A convolution is linear in x, so dL/dx does not depend on x."""

    def body(mesh):
        x = shard(randn(1, 2, 5), layout_at(mesh, (1, 2, 5), [[0, 1, 1], None, None]))
        (grad,) = torch.autograd.grad(call(x, randn(2, 2, 3)).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x, allow_unused=True)

    assert on_ranks((2, 1, 1), body) == [(None,)] * 2
