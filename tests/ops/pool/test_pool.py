"""Split pooling equals the one-device run, including torch's way of counting."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pydist.errors import NotSupported
from pydist.profile.recorder import SpanRecorder
from support.equivalence import check_function, even_points, layout_at, on_ranks, randn, shard
from support.equivalence.exact import check_exact, whole_numbers
from support.equivalence.strategies import WindowCase, windows

LP = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def in_format(x: Tensor, channels_last: bool) -> Tensor:
    """Returns the tensor channels-last or unchanged."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
def test_average(dims, data):
    case: WindowCase = data.draw(windows(dims=dims, dilations=1, pooling=True))
    options = {
        "ceil_mode": data.draw(st.booleans(), "ceil_mode"),
        "count_include_pad": data.draw(st.booleans(), "count_include_pad"),
    }
    if dims > 1:
        options["divisor_override"] = data.draw(st.sampled_from([None, 1, 7]), "divisor_override")
    check_function(
        lambda x: AVG[dims](x, case.kernel, case.stride, case.padding, **options),
        in_format(randn(2, 2, *case.extents), data.draw(st.booleans(), "channels last")),
        (),
        case.points,
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
    )


BY_NAME = {
    "average 3/2/1, CosmoFlow's": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "average 3/2/1, padding not counted": lambda x: F.avg_pool3d(
        x, 3, 2, 1, count_include_pad=False
    ),
    "average 2, stride as the kernel": lambda x: F.avg_pool3d(x, 2),
    "average of ceil mode": lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True),
    "maximum 3/2/1": lambda x: F.max_pool3d(x, 3, 2, 1),
    "maximum 2": lambda x: F.max_pool3d(x, 2),
    "maximum by keywords": lambda x: F.max_pool3d(x, kernel_size=3, stride=1, padding=1),
    "adaptive average to one": lambda x: F.adaptive_avg_pool3d(x, 1),
    "adaptive average of a divisor": lambda x: F.adaptive_avg_pool3d(x, (2, 4, None)),
    "adaptive maximum to one": lambda x: F.adaptive_max_pool3d(x, 1),
    "adaptive maximum of a divisor": lambda x: F.adaptive_max_pool3d(x, 4),
}
POINTS = {
    "2x1x1": [[0, 4, 8], None, None],
    "8x1x1": [list(range(9)), None, None],
    "uneven, one empty": [[0, 1, 1, 8], None, [0, 3, 8]],
    "2x2x2": [[0, 3, 8], [0, 4, 8], [0, 5, 8]],
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("pool", BY_NAME.values(), ids=BY_NAME)
def test_by_name_to_second_order(pool, points):
    check_function(lambda x: pool(x * x), randn(2, 2, 8, 8, 8), (), points, second_order=True)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_channels_last_to_second_order(points):
    check_function(
        lambda x: F.avg_pool3d(x * x, 3, 2, 1),
        in_format(randn(2, 3, 8, 8, 8), True), (), points, second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("pool", [BY_NAME["average 3/2/1, CosmoFlow's"], BY_NAME["maximum 2"]])
def test_channels_last_stays_channels_last(pool):
    whole = in_format(randn(2, 3, 8, 8, 8), True)

    def body(mesh):
        x = shard(whole, layout_at(mesh, whole.shape, [[0, 4, 8], None, None]))
        y = pool(x)
        y.sum().backward()
        return y.to_local(), x.grad.to_local()

    for tensors in on_ranks((2, 1, 1), body):
        assert all(t.is_contiguous(memory_format=torch.channels_last_3d) for t in tensors)


def spans_of(pool, points, backward=True):
    """Returns every rank's spans in the order in which they ended, and its saved element count."""

    def body(mesh):
        x = shard(randn(1, 2, 8, 8, 8), layout_at(mesh, (1, 2, 8, 8, 8), points))
        pool(x)  # makes the plan
        recorder, saved = SpanRecorder(), []
        mesh.session.timers.recorder = recorder
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = pool(x)
        if backward:
            y.to_local().sum().backward()
        return [span.part for span in recorder.spans], sum(t.numel() for t in saved)

    return on_ranks((2, 1, 1), body)


def test_average_computes_while_its_halo_travels_and_saves_nothing():
    (_, saved), (spans, _) = spans_of(
        BY_NAME["average 3/2/1, CosmoFlow's"], [[0, 4, 8], None, None], backward=False
    )
    assert spans == ["pack", "compute", "halo in flight", "halo", "boundary"]
    assert saved == 0


@pytest.mark.parametrize("name", ["maximum 2", "average 2, stride as the kernel"])
def test_windows_within_the_blocks_exchange_nothing(name):
    for spans, _ in spans_of(BY_NAME[name], [[0, 4, 8], None, None]):
        assert not {"pack", "halo", "halo in flight", "boundary"} & set(spans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_are_averaged_almost_as_if_rounded_once(dtype):
    x = randn(1, 4, 8, 8, 8) + 1
    exact = F.avg_pool3d(x.to(dtype).double(), 3, 2, 1)
    once = (exact.to(dtype).double() - exact).square().mean().sqrt()

    def body(mesh):
        split = shard(x.to(dtype), layout_at(mesh, x.shape, [even_points(8, 2), None, None]))
        y = F.avg_pool3d(split, 3, 2, 1).full_tensor().detach()
        with torch.autocast("cpu", torch.bfloat16):
            assert F.avg_pool3d(split, 3, 2, 1).dtype == torch.float32  # autocast's rule
        return y

    for y in on_ranks((2, 1, 1), body):
        assert y.dtype == dtype
        assert (y.double() - exact).square().mean().sqrt() <= 1.5 * once


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
def test_maxima_and_indices_of_equal_values_are_torchs(dims, data):
    case: WindowCase = data.draw(windows(dims=dims, pooling=True))
    ceil_mode = data.draw(st.booleans(), "ceil_mode")
    kind = data.draw(st.sampled_from(["equal", "nan", "-inf"]), "kind")
    x = whole_numbers(2, 2, *case.extents)
    if data.draw(st.booleans(), "all negative"):
        x = -1 - x.abs()  # the padding must not win
    if kind != "equal":
        x[whole_numbers(*x.shape, seed=1) > 0] = float(kind)
    if kind != "-inf" or dims != 3:  # torch's indices are outside the window there
        x = in_format(x, data.draw(st.booleans(), "channels last"))
    check_exact(
        lambda x: MAX[dims](
            x, case.kernel, case.stride, case.padding, case.dilation, ceil_mode, True
        ),
        x,
        case.points,
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_maxima_in_all_types(dtype):
    x = whole_numbers(2, 3, 9, 8, 6).to(dtype)
    for each in (x, in_format(x, True)):
        check_exact(
            lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True), each,
            [[0, 4, 9], None, [0, 1, 6]],
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_maxima_of_integers(dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.max, info.max - 1, info.min, info.min, info.min + 1] * 16)
    x = x.to(dtype).view(1, 2, 6, 2, 4)
    check_function(lambda x: F.max_pool3d(x, 2, 1), x, (), [[0, 2, 6], None, None])
    expected = F.max_pool3d(x, 2, 1)
    found = on_ranks(
        (2, 1, 1),
        lambda mesh: F.max_pool3d(
            shard(x, layout_at(mesh, x.shape, [[0, 2, 6], None, None])), 2, 1
        ).full_tensor(),
    )
    assert all(torch.equal(y, expected) for y in found)


LARGE = {
    "a window of more inputs than a byte numbers": lambda x: F.max_pool3d(
        x, (7, 6, 7), 1, 3, return_indices=True
    ),
    "torch.max_pool3d": lambda x: torch.max_pool3d(x, [2, 2, 2], [2, 2, 2]),
    "with_indices by name": lambda x: F.max_pool3d_with_indices(x, 3, 2, 1),
    "no batch dim": lambda x: F.max_pool3d(x[0], 3, 2, 1, return_indices=True),
    "no padding, parts of windows beyond": lambda x: F.max_pool3d(x, 3, 3, ceil_mode=True),
}


@pytest.mark.parametrize("call", LARGE.values(), ids=LARGE)
def test_maxima_by_other_ways(call):
    check_exact(call, whole_numbers(2, 2, 8, 7, 8), [[0, 3, 8], None, [0, 0, 5, 8]])


def test_maxima_of_one_dim_by_other_ways():
    for call in (torch.max_pool1d, torch.max_pool1d_with_indices, F.max_pool1d_with_indices):
        check_exact(lambda x, call=call: call(x, 3, 2, 1), whole_numbers(2, 2, 9), [[0, 4, 9]])


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=15)
def test_power_average(dims, data):
    case: WindowCase = data.draw(windows(dims=dims, dilations=1, pooling=True))
    p = data.draw(st.sampled_from([1, 2, 3, 1.5, math.inf, -math.inf]), "p")
    kernel = case.kernel[0] if dims == 1 else case.kernel
    ceil_mode = data.draw(st.booleans(), "ceil_mode")
    check_function(
        lambda x: LP[dims](x, p, kernel, case.stride, ceil_mode),
        randn(2, 2, *case.extents).abs() + 0.1, (), case.points, second_order=math.isfinite(p),
    )  # fmt: skip


def test_halo_travels_while_maxima_are_computed_and_one_byte_an_output_is_kept():
    pool = BY_NAME["maximum 3/2/1"]
    for spans, saved in spans_of(pool, [[0, 4, 8], None, None], backward=False):
        middle = [part for part in spans if part != "pack"]
        assert middle == ["compute", "halo in flight", "halo", "boundary"]
        assert saved == 2 * 2 * 4 * 4
    (_, _), (spans, _) = spans_of(pool, [[0, 4, 8], None, None])
    assert spans[-5:] == ["boundary", "pack", "compute", "halo in flight", "halo"]


def test_autocast_computes_what_torch_does_in_fp32():
    calls = {
        "max 3": lambda x: F.max_pool3d(x, 3, 2, 1), "max 2": lambda x: F.max_pool2d(x[:, 0], 2),
        "adaptive max 3": lambda x: F.adaptive_max_pool3d(x, 3),
        "adaptive avg 3": lambda x: F.adaptive_avg_pool3d(x, 1),
        "adaptive avg 2": lambda x: F.adaptive_avg_pool2d(x[:, 0], 3),
        "unpool 2": lambda x: F.max_unpool2d(*F.max_pool2d(x[:, 0], 2, return_indices=True), 2),
    }  # fmt: skip
    x = randn(2, 3, 8, 6, 6).bfloat16()
    for name, call in calls.items():
        with torch.autocast("cpu", torch.bfloat16):
            expected = call(x)

        def body(mesh, call=call):
            split = shard(x, layout_at(mesh, x.shape, [None, [0, 3, 6], None]))
            with torch.autocast("cpu", torch.bfloat16):
                return call(split).full_tensor()

        for y in on_ranks((1, 2, 1), body):
            assert y.dtype == expected.dtype, name
            torch.testing.assert_close(y, expected, rtol=0.01, atol=0.01, msg=name)


REFUSED = {
    "average of integers": (lambda x: F.avg_pool3d(x.long(), 2), "int64"),
    "maximum of wide integers": (lambda x: F.max_pool3d(x.long(), 2), "int64"),
    "other dims": (lambda x: F.avg_pool2d(x, 2), "N, C"),
    "padding over half a kernel": (lambda x: F.avg_pool3d(x, 2, 2, 2), "more than half"),
    "negative padding in an average": (lambda x: F.avg_pool3d(x, 2, 1, -1), "is negative"),
    "negative padding in a maximum": (lambda x: F.max_pool3d(x, 2, 1, -1), "is negative"),
    "a divisor of 0": (lambda x: F.avg_pool3d(x, 2, divisor_override=0), "a divisor of 0"),
    "a window of padding alone": (
        lambda x: F.max_pool3d(x[:, :, :, :, :1], (1, 1, 2), 1, (0, 0, 1), (1, 1, 2)),
        "hold no input",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    def body(mesh):
        x = shard(randn(1, 1, 4, 4, 4), layout_at(mesh, (1, 1, 4, 4, 4), [[0, 2, 4], None, None]))
        with pytest.raises(NotSupported, match=message):
            call(x)

    on_ranks((2, 1, 1), body)
