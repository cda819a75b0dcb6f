"""Sums over pooling windows against their definition, and backward as the adjoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.kernels.arrays import grid_tensor, strided, triples
from support.kernels.pool_sums import ORIGIN, TOLERANCE, Pooling, assert_near, in_float64

ORDERS = st.sampled_from([(0, 1, 2, 3, 4), (0, 2, 3, 4, 1)]) | st.permutations(range(5))


@st.composite
def cases(draw, dtypes=tuple(TOLERANCE)):
    """Draws source, out, their scales and pooling; many windows meet the source, or none."""
    kernel = draw(triples(st.integers(1, 5)))
    stride = draw(triples(st.sampled_from([1, 2, 2, 3])))
    padding = draw(triples(st.integers(0, 3)))
    sources = draw(triples(st.integers(0, 9)))
    outs = draw(triples(st.integers(0, 9)))
    if draw(st.booleans()):  # rows of several vectors
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
