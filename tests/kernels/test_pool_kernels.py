"""Sums over pooling windows against loops and torch; pieces against a whole; the adjoint."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import adaptive_avg_pool3d, avg_pool3d

from pydist import _native as native

TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}
ORIGIN = (0, 0, 0)


def footprints(kernel, stride, padding):
    return [
        native.Footprint(k, s, 1, p, p) for k, s, p in zip(kernel, stride, padding, strict=True)
    ]


@dataclass(frozen=True)
class Pooling:
    """Where the two arrays lie in global coordinates, and the windows."""

    source_lo: tuple[int, int, int]
    out_lo: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]

    @property
    def footprints(self):
        return footprints(self.kernel, self.stride, self.padding)

    def forward(self, source, out, scales, accumulate):
        native.pool_sum_forward(
            source, out, self.source_lo, self.out_lo, self.footprints, scales, accumulate
        )

    def backward(self, grad, source_grad, scales, accumulate):
        native.pool_sum_backward(
            grad, source_grad, self.out_lo, self.source_lo, self.footprints, scales, accumulate
        )

    def matrices(self, sources, outs, scales):
        """Along each dim, the matrix [outs, sources] of scaled memberships: the definition."""
        result = []
        for dim in range(3):
            o = np.arange(outs[dim])[:, None]
            i = np.arange(sources[dim])[None, :]
            start = (o + self.out_lo[dim]) * self.stride[dim] - self.padding[dim]
            tap = i + self.source_lo[dim] - start
            inside = (tap >= 0) & (tap < self.kernel[dim])
            result.append(inside * np.asarray(scales[dim])[:, None])
        return result


def triples(elements):
    return st.tuples(elements, elements, elements)


def grid_tensor(shape, dtype, generator):
    """Multiples of 1/8: fp16 and bf16 hold them exactly, so only sums are rounded."""
    return torch.from_numpy(generator.integers(-16, 17, shape) / 8).to(dtype)


def strided(tensor, order, gap):
    """The same values in another memory order, with a gap behind each row."""
    permuted = tensor.permute(*order)
    padded = tensor.new_zeros(*permuted.shape[:-1], permuted.shape[-1] + gap)
    view = padded[..., : permuted.shape[-1]]
    view.copy_(permuted)
    return view.permute(*np.argsort(order).tolist())


ORDERS = st.sampled_from([(0, 1, 2, 3, 4), (0, 2, 3, 4, 1)]) | st.permutations(range(5))


@st.composite
def cases(draw, dtypes=tuple(TOLERANCE)):
    """Source, out, their scales and pooling; many windows meet the source, or none."""
    kernel = draw(triples(st.integers(1, 5)))
    stride = draw(triples(st.sampled_from([1, 2, 2, 3])))
    padding = draw(triples(st.integers(0, 3)))
    sources = draw(triples(st.integers(0, 9)))
    outs = draw(triples(st.integers(0, 9)))
    if draw(st.booleans()):  # lines of several vectors
        sources, outs = (*sources[:2], 70), (*outs[:2], draw(st.sampled_from([35, 70])))
    source_lo = draw(triples(st.integers(-4, 9)))
    out_lo = tuple(
        draw(st.integers(-1, 2)) + i // s for i, s in zip(source_lo, stride, strict=True)
    )
    channels = draw(st.sampled_from([1, 2, 3, 5, 8, 20, 33]))
    dtype = draw(st.sampled_from(dtypes))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = [
        strided(
            grid_tensor((2, channels, *shape), dtype, generator),
            draw(ORDERS),
            draw(st.sampled_from([0, 3])),
        )
        for shape in (sources, outs)
    ]
    choices = [0.25, 0.5, 1.0] if draw(st.booleans()) else [1.0]
    scales = [torch.from_numpy(generator.choice(choices, n)).double() for n in outs]
    return *arrays, scales, Pooling(source_lo, out_lo, kernel, stride, padding)


def in_float64(tensor):
    return np.ascontiguousarray(tensor.double().numpy())


def assert_near(actual, expected, dtype):
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(in_float64(actual), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@settings(deadline=None)
@given(cases(), st.booleans())
def test_forward_equals_the_definition(case, accumulate):
    source, out, scales, pooling = case
    matrices = pooling.matrices(source.shape[2:], out.shape[2:], scales)
    expected = np.einsum("ncijk,ai,bj,dk->ncabd", in_float64(source), *matrices, optimize=True)
    if accumulate:
        expected += in_float64(out)
    else:
        out.fill_(torch.nan)
    pooling.forward(source, out, scales, accumulate)
    assert_near(out, expected, source.dtype)


@settings(deadline=None)
@given(cases(), st.booleans())
def test_backward_equals_the_definition(case, accumulate):
    source, out, scales, pooling = case
    matrices = pooling.matrices(source.shape[2:], out.shape[2:], scales)
    expected = np.einsum("ncabd,ai,bj,dk->ncijk", in_float64(out), *matrices, optimize=True)
    if accumulate:
        expected += in_float64(source)
    else:
        source.fill_(torch.nan)
    pooling.backward(out, source, scales, accumulate)
    assert_near(source, expected, source.dtype)


@settings(deadline=None)
@given(cases(dtypes=[torch.float64]))
def test_backward_is_the_adjoint(case):
    source, out, scales, pooling = case
    pooled, spread = torch.empty_like(out), torch.empty_like(source)
    pooling.forward(source, pooled, scales, False)
    pooling.backward(out, spread, scales, False)
    assert (pooled * out).sum().item() == pytest.approx((source * spread).sum().item(), abs=1e-9)


def test_accumulating_touches_only_what_is_reached():
    """-0.0 + 0.0 is 0.0: the signs tell which elements were added to."""
    slab, out = torch.ones(1, 2, 1, 8, 8), torch.full((1, 2, 4, 4, 4), -0.0)
    scales = [torch.ones(4, dtype=torch.float64)] * 3
    pooling = Pooling((3, 0, 0), ORIGIN, (3, 3, 3), (2, 2, 2), (1, 1, 1))
    pooling.forward(slab, out, scales, True)
    assert torch.equal(~torch.signbit(out[0, 0, :, 0, 0]), torch.tensor([0, 1, 1, 0]).bool())
    assert out[0, 1, 1, 1, 1].item() == 9

    grad, spread = torch.ones(1, 2, 1, 4, 4), torch.full((1, 2, 8, 8, 8), -0.0)
    pooling = Pooling(ORIGIN, (2, 0, 0), (3, 3, 3), (2, 2, 2), (1, 1, 1))
    pooling.backward(grad, spread, [scales[0][:1], *scales[1:]], True)
    reached = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0]).bool()
    assert torch.equal(~torch.signbit(spread[0, 0, :, 1, 1]), reached)
    assert spread[0, 1, 3, 1, 1].item() == 4


def whole_scales(extents, outs, pooling, include_padding):
    """torch's divisors, as scales along each dim."""
    scales = []
    for n, m, k, s, p in zip(
        extents, outs, pooling.kernel, pooling.stride, pooling.padding, strict=True
    ):
        start = torch.arange(m) * s - p
        stop = (start + k).clamp(max=n + p)
        if not include_padding:
            start, stop = start.clamp(min=0), stop.clamp(max=n)
        scales.append(1 / (stop - start).double())
    return scales


@st.composite
def shards(draw):
    """A pooling of a domain, and the blocks [lo, hi) of inputs and of outputs of one rank."""
    kernel = draw(triples(st.sampled_from([2, 3, 3, 4])))
    stride = draw(triples(st.sampled_from([1, 2, 3])))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    extents = draw(triples(st.integers(5, 12)))
    pooling = Pooling(ORIGIN, ORIGIN, kernel, stride, padding)
    outs = [
        (n + 2 * p - k) // s + 1
        for n, k, s, p in zip(extents, kernel, stride, padding, strict=True)
    ]
    boxes = [
        tuple(
            zip(
                *(sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape),
                strict=True,
            )
        )
        for shape in (extents, outs)
    ]
    return extents, outs, boxes, pooling


def crop(x, lo, hi):
    return x[(..., *(slice(a, b) for a, b in zip(lo, hi, strict=True)))]


@settings(deadline=None)
@given(shards(), st.booleans(), st.booleans())
def test_own_block_plus_slabs_is_the_average_pooling_of_torch(case, include_padding, channels_last):
    extents, outs, ((lo, hi), (out_lo, out_hi)), whole = case
    torch.manual_seed(0)
    x = torch.randn(2, 3, *extents, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    windows = (whole.kernel, whole.stride, whole.padding)
    y = avg_pool3d(x, *windows, count_include_pad=include_padding)
    scales = whole_scales(extents, outs, whole, include_padding)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, grad)

    def pooling(source_lo, out_lo):
        return Pooling(source_lo, out_lo, *windows)

    def scales_of(lo, hi):
        return [s[a:b] for s, a, b in zip(scales, lo, hi, strict=True)]

    source = x.detach()
    everything = native.Box(ORIGIN, extents)
    out = torch.full_like(crop(y, out_lo, out_hi), torch.nan)
    own_scales = scales_of(out_lo, out_hi)
    pooling(lo, out_lo).forward(crop(source, lo, hi), out, own_scales, False)
    for slab in native.subtract(everything, native.Box(lo, hi)):
        piece = crop(source, slab.lo, slab.hi).contiguous()
        pooling(slab.lo, out_lo).forward(piece, out, own_scales, True)
    torch.testing.assert_close(out, crop(y, out_lo, out_hi).detach(), rtol=0, atol=1e-13)

    spread = torch.full_like(crop(source, lo, hi), torch.nan)
    pooling(lo, out_lo).backward(crop(grad, out_lo, out_hi), spread, own_scales, False)
    for slab in native.subtract(native.Box(ORIGIN, outs), native.Box(out_lo, out_hi)):
        piece = crop(grad, slab.lo, slab.hi).contiguous()
        piece_scales = [s.contiguous() for s in scales_of(slab.lo, slab.hi)]
        pooling(lo, slab.lo).backward(piece, spread, piece_scales, True)
    torch.testing.assert_close(spread, crop(expected, lo, hi), rtol=0, atol=1e-13)


def large_case(dtype, channels_last):
    """Several tasks, blocks of channels and lines of a buffer."""
    torch.manual_seed(0)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.randn(2, 72, 21, 33, 50).to(dtype).contiguous(memory_format=layout)
    y = torch.empty(2, 72, 11, 17, 25, dtype=dtype).contiguous(memory_format=layout)
    scales = [torch.full((n,), 1 / 3, dtype=torch.float64) for n in y.shape[2:]]
    return x, y, scales, Pooling(ORIGIN, ORIGIN, (3, 3, 3), (2, 2, 2), (1, 1, 1))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_arrays_give_one_result_for_any_number_of_threads(dtype, channels_last):
    x, y, scales, pooling = large_case(dtype, channels_last)
    before = native.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            native.set_num_threads(count)
            out, spread = torch.empty_like(y), torch.empty_like(x)
            pooling.forward(x, out, scales, False)
            pooling.backward(out, spread, scales, False)
            results.append((out, spread))
    finally:
        native.set_num_threads(before)
    expected = avg_pool3d(x.double(), 3, 2, 1)
    assert_near(results[0][0], expected.numpy(), dtype)
    for out, spread in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(spread, results[0][1])


@pytest.mark.parametrize("channels_last", [False, True])
def test_targets_larger_than_the_caches(channels_last):
    """They are written past the caches, whole vectors at a time."""
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    grad = torch.arange(8.0).expand(4, 16, 20, 64, 8).contiguous(memory_format=layout)
    spread = torch.empty(4, 16, 40, 128, 27)[..., :26].contiguous(memory_format=layout)
    scales = [torch.ones(n, dtype=torch.float64) for n in grad.shape[2:]]
    Pooling(ORIGIN, ORIGIN, (2, 2, 3), (2, 2, 3), ORIGIN).backward(grad, spread, scales, False)
    expected = torch.zeros(26)
    expected[:24] = torch.arange(8.0).repeat_interleave(3)
    assert spread.numel() * spread.element_size() > 32 << 20
    assert torch.equal(spread, expected.expand(spread.shape))


ISA_SCRIPT = """
import torch
from pydist import _native as native
torch.manual_seed(0)
sums = []
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        for stride in (1, 2):
            x = torch.randn(1, 21, 5, 7, 37).to(dtype).contiguous(memory_format=layout)
            y = torch.empty(1, 21, 3, 4, (36 // stride) + 1, dtype=dtype)
            y = y.contiguous(memory_format=layout)
            scales = [torch.full((n,), 0.3, dtype=torch.float64) for n in y.shape[2:]]
            windows = [native.Footprint(3, s, 1, 1, 1) for s in (2, 2, stride)]
            tail = ((0, 0, 0), (0, 0, 0), windows, scales, False)
            native.pool_sum_forward(x, y, *tail)
            native.pool_sum_backward(y, x, *tail)
            sums += [y.double().abs().sum().item(), x.double().abs().sum().item()]
print(native.cpu_isa(), *sums)
"""


def test_all_instruction_sets_agree():
    results = {}
    for isa in ["base", "x86-64-v3", "x86-64-v4"]:
        done = subprocess.run(
            [sys.executable, "-c", ISA_SCRIPT],
            cwd=Path(__file__).parent,  # not the checkout's folder, where sources hide the package
            env={"PYDIST_ISA": isa, "PYTHONPATH": ":".join(filter(None, sys.path))},
            check=True,
            capture_output=True,
            text=True,
        )
        name, *sums = done.stdout.split()
        results[isa] = [float(value) for value in sums]
        if isa == "base":
            assert name == "base"
    for isa, sums in results.items():
        np.testing.assert_allclose(sums, results["base"], rtol=1e-4, err_msg=isa)


def refusal(*args):
    with pytest.raises(ValueError, match=r".") as info:
        native.pool_sum_forward(*args)
    message = str(info.value)
    assert "\n" not in message
    return message


def test_refusals_name_what_was_given():
    x, y = torch.zeros(1, 4, 6, 6, 6), torch.zeros(1, 4, 3, 3, 3)
    scales = [torch.ones(3, dtype=torch.float64)] * 3
    two = footprints((2, 2, 2), (2, 2, 2), ORIGIN)
    tail = (ORIGIN, ORIGIN, two)
    assert "source is float32 (1, 4, 6, 6)" in refusal(x[:, :, 0], y, *tail, scales, False)
    assert "int32" in refusal(x.int(), y.int(), *tail, scales, False)
    assert "float64" in refusal(x, y.double(), *tail, scales, False)
    assert "channels" in refusal(x[:, :3], y, *tail, scales, False)
    assert "2 footprints" in refusal(x, y, ORIGIN, ORIGIN, two[:2], scales, False)
    dilated = [native.Footprint(2, 2, 3), *two[1:]]
    assert "dilation 3" in refusal(x, y, ORIGIN, ORIGIN, dilated, scales, False)
    assert "(0, 0)" in refusal(x, y, (0, 0), ORIGIN, two, scales, False)
    assert "2 arrays" in refusal(x, y, *tail, scales[:2], False)
    assert "scales[2] is float32" in refusal(x, y, *tail, [*scales[:2], torch.ones(3)], False)
    long = torch.ones(4, dtype=torch.float64)
    assert "scales[1] is float64 (4,)" in refusal(x, y, *tail, [scales[0], long, scales[2]], False)
    assert "stride 0" in refusal(x, y[:, :1].expand(1, 4, 3, 3, 3), *tail, scales, False)
    assert "64 bits" in refusal(x, y, ORIGIN, (2**62, 0, 0), two, scales, False)
    adaptive = [native.Footprint.adaptive(6, 3)] * 3
    assert "domain" in refusal(x, y, (1, 0, 0), ORIGIN, adaptive, scales, False)


def test_backward_checks_its_arguments_as_forward_does():
    x, y = torch.zeros(1, 4, 6, 6, 6), torch.zeros(1, 4, 3, 3, 3)
    scales = [torch.ones(3, dtype=torch.float64)] * 3
    tail = (ORIGIN, ORIGIN, footprints((2, 2, 2), (2, 2, 2), ORIGIN), scales, True)
    with pytest.raises(ValueError, match=r"source_grad is float32 .* stride 0"):
        native.pool_sum_backward(y, x[:, :1].expand(1, 4, 6, 6, 6), *tail)
    with pytest.raises(ValueError, match=r"scales\[0\] is float64 \(3,\) .* grad is float32"):
        native.pool_sum_backward(y[:, :, :2], x, *tail)

    with pytest.raises(ValueError, match=r"a gate and a negative slope below 1 come together"):
        native.pool_sum_backward(y, x, *tail, None, 0.5)
    with pytest.raises(ValueError, match=r"gate is float32 .* one shape and the same strides"):
        native.pool_sum_backward(y, x, *tail, x.transpose(3, 4), 0.5)
    with pytest.raises(ValueError, match=r"negative slope of 1.5.*: 0 to 1 is possible"):
        native.pool_sum_backward(y, x, *tail, x, 1.5)


@pytest.mark.parametrize("slope", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["plain", "channels last", "channels last in one"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_relu_in_the_pass_gives_the_bits_of_one_apart(accumulate, layout, dtype, slope):
    torch.manual_seed(0)
    x, y = torch.randn(2, 20, 13, 18, 41).to(dtype), torch.randn(2, 20, 7, 9, 21).to(dtype)
    if layout != "plain":
        y = y.contiguous(memory_format=torch.channels_last_3d)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last_3d)
    x[0, 0, 0, 0, :3] = torch.tensor([torch.nan, -torch.inf, 0.0])
    windows = footprints((3, 3, 3), (2, 2, 2), (1, 1, 1))
    tail = (ORIGIN, ORIGIN, windows, [torch.rand(n).double() for n in y.shape[2:]], accumulate)
    act = torch.nn.LeakyReLU(slope) if slope else torch.nn.ReLU()
    apart, fused = y.clone(), y.clone()
    native.pool_sum_forward(act(x), apart, *tail)
    native.pool_sum_forward(x, fused, *tail, slope)
    torch.testing.assert_close(fused, apart, rtol=0, atol=0, equal_nan=True)
    apart, fused = torch.zeros_like(x), torch.zeros_like(x)
    native.pool_sum_backward(y, apart, *tail)
    native.pool_sum_backward(y, fused, *tail, x, slope)
    apart *= torch.where(x > 0, 1.0, slope)
    apart[x.isnan()] = fused[x.isnan()]  # ReLU and leaky ReLU differ there, as in torch
    torch.testing.assert_close(fused, apart, rtol=0, atol=0)


@settings(deadline=None, max_examples=25)
@given(triples(st.integers(1, 8)), triples(st.integers(1, 10)), st.booleans())
def test_adaptive_windows_are_torchs(extents, outs, channels_last):
    torch.manual_seed(0)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.randn(2, 3, *extents, dtype=torch.float64).contiguous(memory_format=layout)
    x.requires_grad_()
    y = adaptive_avg_pool3d(x, outs)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, grad)
    windows = [native.Footprint.adaptive(n, m) for n, m in zip(extents, outs, strict=True)]
    out, spread = torch.empty_like(y), torch.empty_like(x.detach())
    scales = [
        torch.tensor(
            [1 / (f.needs(o, o + 1)[1] - f.needs(o, o + 1)[0]) for o in range(f.outputs)],
            dtype=torch.float64,
        )
        for f in windows
    ]
    native.pool_sum_forward(x.detach(), out, ORIGIN, ORIGIN, windows, scales, False)
    native.pool_sum_backward(grad, spread, ORIGIN, ORIGIN, windows, scales, False)
    torch.testing.assert_close(out, y.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(spread, expected, rtol=0, atol=1e-13)
