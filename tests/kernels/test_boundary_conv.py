"""Boundary convolution against its NumPy definition, and slabs plus shard against one device."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv3d

from pydist import _native as native
from support.kernels.arrays import grid_tensor, refusal, strided, triples
from support.kernels.instruction_sets import assert_all_agree

TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}


@st.composite
def cases(draw):
    """Draws arrays and attributes; with `in_lo` and `out_lo`, many pairs meet, or none."""
    kernel = draw(triples(st.integers(1, 4)))
    attributes = {
        "stride": draw(triples(st.integers(1, 3))),
        "padding": draw(triples(st.integers(0, 2))),
        "dilation": draw(triples(st.sampled_from([1, 1, 2]))),
        "groups": draw(st.sampled_from([1, 1, 2, 3])),
    }
    thin = draw(st.integers(0, 2))
    in_shape, out_shape = (
        tuple(
            draw(st.integers(0, 3)) if dim == thin else draw(st.integers(1, 9)) for dim in [0, 1, 2]
        )
        for _ in range(2)
    )
    lo = st.integers(-4, 6)
    batch, ci, co = (draw(st.integers(1, n)) for n in (3, 5, 9))
    groups = attributes["groups"]
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    order = draw(st.permutations(range(5)))
    arrays = [
        strided(grid_tensor(shape, dtype, generator), order)
        for shape in [
            (batch, ci * groups, *in_shape),
            (co * groups, ci, *kernel),
            (batch, co * groups, *out_shape),
        ]
    ]
    in_lo = draw(triples(lo))
    out_lo = tuple(
        draw(st.integers(-1, 2)) + i // s for i, s in zip(in_lo, attributes["stride"], strict=True)
    )
    return arrays, {"in_lo": in_lo, "out_lo": out_lo, **attributes}


def in_float64(tensor):
    return np.ascontiguousarray(tensor.double().numpy())


def assert_near(actual, expected, dtype):
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(in_float64(actual), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def call(kernel, first, second, target, attributes, positions):
    kernel(
        first,
        second,
        target,
        *(attributes[name] for name in positions),
        attributes["stride"],
        attributes["padding"],
        attributes["dilation"],
        attributes["groups"],
    )


@settings(deadline=None)
@given(cases())
def test_forward_equals_reference(boundary_conv, case):
    (x, w, y), attributes = case
    expected = in_float64(y)
    boundary_conv.forward(
        in_float64(x), in_float64(w), expected, boundary_conv.Attributes(**attributes)
    )
    call(native.boundary_conv_forward, x, w, y, attributes, ["in_lo", "out_lo"])
    assert_near(y, expected, x.dtype)


@settings(deadline=None)
@given(cases())
def test_dgrad_equals_reference(boundary_conv, case):
    (x, w, y), attributes = case
    expected = in_float64(x)
    boundary_conv.dgrad(
        in_float64(y), in_float64(w), expected, boundary_conv.Attributes(**attributes)
    )
    call(native.boundary_conv_dgrad, y, w, x, attributes, ["out_lo", "in_lo"])
    assert_near(x, expected, x.dtype)


@settings(deadline=None)
@given(cases())
def test_wgrad_equals_reference(boundary_conv, case):
    (x, w, y), attributes = case
    expected = in_float64(w)
    boundary_conv.wgrad(
        in_float64(x), in_float64(y), expected, boundary_conv.Attributes(**attributes)
    )
    call(native.boundary_conv_wgrad, x, y, w, attributes, ["in_lo", "out_lo"])
    assert_near(w, expected, x.dtype)


def shell(shape, cut, halo):
    """Returns the disjoint slabs of width `halo` around [cut_lo, cut_hi), clipped to the domain."""
    lo, hi = cut
    outer = native.Box(
        [max(0, a - h) for a, h in zip(lo, halo, strict=True)],
        [min(n, b + h) for n, b, h in zip(shape, hi, halo, strict=True)],
    )
    return native.subtract(outer, native.Box(lo, hi))


def crop(x, lo, hi):
    return x[(..., *(slice(a, b) for a, b in zip(lo, hi, strict=True)))]


@st.composite
def shards(draw):
    """Draws a "same" convolution of a domain, and the shard [lo, hi) that one rank owns."""
    kernel = draw(triples(st.sampled_from([1, 3, 3, 5])))
    dilation = draw(triples(st.sampled_from([1, 1, 2])))
    shape = draw(triples(st.integers(4, 10)))
    ends = [sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    groups = draw(st.sampled_from([1, 2]))
    return shape, tuple(zip(*ends, strict=True)), kernel, dilation, groups


@settings(deadline=None)
@given(shards())
def test_shard_padded_with_zeros_plus_slabs_equals_the_whole(case):
    shape, (lo, hi), kernel, dilation, groups = case
    torch.manual_seed(0)
    x = torch.randn(2, 2 * groups, *shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3 * groups, 2, *kernel, dtype=torch.float64, requires_grad=True)
    padding = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    options = {"padding": padding, "dilation": dilation, "groups": groups}
    whole = conv3d(x, w, **options)
    g = torch.randn_like(whole)
    tail = ((1, 1, 1), padding, dilation, groups)
    slabs = shell(shape, (lo, hi), padding)

    own = crop(x, lo, hi).detach().contiguous().requires_grad_()
    y = conv3d(own, w, **options)
    ys = y.detach().clone()
    for slab in slabs:
        piece = crop(x, slab.lo, slab.hi).detach()
        native.boundary_conv_forward(piece, w.detach(), ys, slab.lo, lo, *tail)
    torch.testing.assert_close(ys, crop(whole, lo, hi).detach(), rtol=0, atol=1e-12)

    # dL/dx of the shard needs the full dL/dy; dL/dw of the shard's outputs needs the slabs of x.
    (gx,) = torch.autograd.grad(whole, x, g, retain_graph=True)
    own_gx, own_gw = torch.autograd.grad(y, (own, w), crop(g, lo, hi))
    own_gx, own_gw = own_gx.contiguous(), own_gw.contiguous()
    for slab in slabs:
        piece = crop(g, slab.lo, slab.hi)
        native.boundary_conv_dgrad(piece, w.detach(), own_gx, slab.lo, lo, *tail)
        piece = crop(x, slab.lo, slab.hi).detach()
        native.boundary_conv_wgrad(piece, crop(g, lo, hi), own_gw, slab.lo, lo, *tail)
    torch.testing.assert_close(own_gx, crop(gx, lo, hi), rtol=0, atol=1e-12)
    masked = torch.zeros_like(g)
    crop(masked, lo, hi).copy_(crop(g, lo, hi))
    (gw,) = torch.autograd.grad(whole, w, masked)
    torch.testing.assert_close(own_gw, gw, rtol=0, atol=1e-11)


def large_case(dtype, thin=0, stride=1):
    torch.manual_seed(0)
    shape = [70, 75, 72]
    shape[thin] = 2
    out_shape = [(n + stride - 1) // stride for n in shape]
    out_shape[thin] = 3
    x = torch.randn(2, 6, *shape).to(dtype)
    w = torch.randn(11, 3, 3, 3, 3).to(dtype)
    y = torch.randn(2, 11 * 1, *out_shape).to(dtype)
    return x[:, :3], w, y


def all_three(x, w, y, stride):
    lo = (0, 0, 0)
    tail = (stride, (1, 1, 1), (1, 1, 1), 1)
    out, grad_in, grad_weight = y.clone(), x.clone(), w.clone()
    native.boundary_conv_forward(x, w, out, lo, lo, *tail)
    native.boundary_conv_dgrad(y, w, grad_in, lo, lo, *tail)
    native.boundary_conv_wgrad(x, y, grad_weight, lo, lo, *tail)
    return out, grad_in, grad_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("thin", [0, 1, 2])
def test_result_does_not_depend_on_the_number_of_threads(dtype, thin):
    before = native.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            native.set_num_threads(count)
            results.append(all_three(*large_case(dtype, thin), (1, 2, 1)))
    finally:
        native.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("thin", [0, 1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_many_tiles_and_chunks_equal_reference(boundary_conv, thin, stride):
    x, w, y = large_case(torch.float32, thin, stride)
    strides = (stride,) * 3
    attributes = boundary_conv.Attributes(
        (0, 0, 0), (0, 0, 0), strides, (1, 1, 1), (1, 1, 1), groups=1
    )
    results = all_three(x, w, y, strides)
    expected = [in_float64(t) for t in (y, x, w)]
    boundary_conv.forward(in_float64(x), in_float64(w), expected[0], attributes)
    boundary_conv.dgrad(in_float64(y), in_float64(w), expected[1], attributes)
    boundary_conv.wgrad(in_float64(x), in_float64(y), expected[2], attributes)
    for actual, wanted in zip(results, expected, strict=True):
        assert_near(actual, wanted, torch.float32)


ISA_SCRIPT = """
import hashlib, torch
from pydist import _native as native
torch.manual_seed(0)
x, w, y = torch.randn(1, 5, 2, 33, 35), torch.randn(11, 5, 3, 3, 3), torch.randn(1, 11, 3, 33, 35)
tail = ((0, 0, 0), (0, 0, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)
grad_in, grad_weight, u = x.clone(), w.clone(), torch.empty(100)
out = y.clone()
native.boundary_conv_forward(x, w, out, *tail)
native.boundary_conv_dgrad(y, w, grad_in, *tail)
native.boundary_conv_wgrad(x, y, grad_weight, *tail)
native.keyed_uniform(u, 7, [0], [100])
print(native.cpu_isa(), *(t.double().abs().sum().item() for t in (out, grad_in, grad_weight, u)))
"""


def test_all_instruction_sets_agree():
    assert_all_agree(ISA_SCRIPT, rtol=1e-6)


def test_refusals_name_what_was_given():
    said = partial(refusal, native.boundary_conv_forward)
    x, w, y = torch.zeros(1, 4, 1, 5, 5), torch.zeros(6, 4, 3, 3, 3), torch.zeros(1, 6, 4, 5, 5)
    lo, one = (0, 0, 0), (1, 1, 1)
    message = said(x, w, y, lo, lo, one, one, one, 2)
    assert "slab" in message
    assert "groups=2" in message
    assert "groups=0" in said(x, w, y, lo, lo, one, one, one, 0)
    assert "int32" in said(x.int(), w.int(), y.int(), lo, lo, one, one, one, 1)
    assert "float64" in said(x, w.double(), y, lo, lo, one, one, one, 1)
    assert "(1, 1)" in said(x, w, y, lo, lo, (1, 1), one, one, 1)
    assert "(1, 0, 1)" in said(x, w, y, lo, lo, (1, 0, 1), one, one, 1)
    assert "samples" in said(x, w, y.repeat(2, 1, 1, 1, 1), lo, lo, one, one, one, 1)
    assert "5" in said(x[0], w, y, lo, lo, one, one, one, 1)
    assert "stride 0" in said(x, w, y[:, :1].expand(1, 6, 4, 5, 5), lo, lo, one, one, one, 1)
