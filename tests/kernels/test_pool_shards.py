"""Sums over pooling windows against torch's pooling: a block and its slabs, adaptive windows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import adaptive_avg_pool3d, avg_pool3d

from pydist import _native as native
from support.kernels.arrays import triples
from support.kernels.pool_sums import ORIGIN, Pooling


def whole_scales(extents, outs, pooling, include_padding):
    """Returns torch's divisors, as scales along each dim."""
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
    """Draws a pooling of a domain, and one rank's blocks [lo, hi) of inputs and outputs."""
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
