"""Maxima over pooling windows by box, against torch's pooling of the full tensor, and adjoints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import adaptive_max_pool3d, max_pool3d

from pydist import _native as native
from support.kernels.arrays import refusal, triples

ORIGIN = (0, 0, 0)
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-9,
}


@st.composite
def poolings(draw):
    """Draws extents, footprints and torch's function."""
    if draw(st.booleans()):
        extents, outs = draw(triples(st.integers(1, 9))), draw(triples(st.integers(1, 9)))
        windows = [native.Footprint.adaptive(n, m) for n, m in zip(extents, outs, strict=True)]
        return extents, windows, lambda x: adaptive_max_pool3d(x, outs, return_indices=True)
    kernel, stride = draw(triples(st.integers(1, 4))), draw(triples(st.integers(1, 3)))
    dilation, slack = draw(triples(st.integers(1, 2))), draw(triples(st.integers(0, 9)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    extents = tuple(
        max(2, (k - 1) * d + 1) + more for k, d, more in zip(kernel, dilation, slack, strict=True)
    )
    windows = [
        native.Footprint(k, s, d, p, p)
        for k, s, d, p in zip(kernel, stride, dilation, padding, strict=True)
    ]
    return (
        extents,
        windows,
        lambda x: max_pool3d(x, kernel, stride, padding, dilation, return_indices=True),
    )


def part(x, box):
    return x[(..., *box.slices)]


def places(taps, windows, extents):
    """Returns the indices in the flattened input that taps represent."""
    kernel = [w.kernel for w in windows]
    number = taps.long()
    row = number // kernel[2]
    flat = torch.zeros_like(number)
    along = (row // kernel[1], row % kernel[1], number % kernel[2])
    for dim, window in enumerate(windows):
        first = [window.needs(o, o + 1)[0] for o in range(taps.shape[2 + dim])]
        start = torch.tensor(first).view(-1, *(1,) * (2 - dim))
        flat = flat * extents[dim] + start + along[dim] * window.dilation
    return flat


@settings(deadline=None)
@given(poolings(), st.data())
def test_own_block_and_slabs_merge_to_what_torch_finds(pooling, data):
    extents, windows, pool = pooling
    dtype = data.draw(st.sampled_from(list(TOLERANCE)), "dtype")
    channels = data.draw(st.sampled_from([1, 2, 5, 20]), "channels")
    torch.manual_seed(data.draw(st.integers(0, 99), "seed"))
    x = (torch.randn(2, channels, *extents) * 2).round().to(dtype)  # many values are equal
    if data.draw(st.booleans(), "NaN"):
        x[torch.rand(x.shape) < 0.05] = torch.nan
    if data.draw(st.booleans(), "channels last"):
        x = x.contiguous(memory_format=torch.channels_last_3d)
    elif data.draw(st.booleans(), "-inf"):  # channels-last, torch's result is wrong
        x[torch.rand(x.shape) < 0.7] = -torch.inf
    y, indices = pool(x)
    taps_fit = windows[0].kernel * windows[1].kernel * windows[2].kernel < 256
    tap_dtype = torch.uint8 if taps_fit and data.draw(st.booleans(), "bytes") else torch.int32
    found, taps = torch.empty_like(y), torch.empty_like(y, dtype=tap_dtype)
    lo = [data.draw(st.integers(0, n)) for n in extents]
    own = native.Box(lo, [data.draw(st.integers(a, n)) for a, n in zip(lo, extents, strict=True)])
    boxes = [own, *data.draw(st.permutations(native.subtract(native.Box(ORIGIN, extents), own)))]

    for box in boxes:
        accumulate = box is not own
        native.pool_max_forward(part(x, box), found, taps, box.lo, ORIGIN, windows, accumulate)
    torch.testing.assert_close(found, y, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places(taps, windows, extents), indices)

    grad, direction = torch.randn_like(y), torch.randn_like(x)
    flat = torch.zeros(2, channels, x[0, 0].numel(), dtype=torch.float64)
    flat.scatter_add_(2, indices.flatten(2), grad.double().flatten(2))
    picked = torch.full_like(y, torch.nan)
    for box in boxes:
        spread = torch.full_like(part(x, box), torch.nan)
        native.pool_max_backward(grad, taps, spread, ORIGIN, box.lo, windows)
        expected = part(flat.view(x.shape), box)
        error = (spread.double() - expected).abs().amax() if spread.numel() else 0
        assert error <= TOLERANCE[dtype] * max(1, float(flat.abs().amax()))
        native.pool_max_pick(
            part(direction, box), taps, picked, box.lo, ORIGIN, windows, box is not own
        )
    expected = direction.flatten(2).gather(2, indices.flatten(2)).view(y.shape)
    assert torch.equal(picked, expected)


@pytest.mark.parametrize("channels_last", [False, True])
def test_large_arrays_give_one_result_for_any_number_of_threads(channels_last):
    torch.manual_seed(0)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.randn(2, 72, 21, 33, 50).contiguous(memory_format=layout)
    windows = [native.Footprint(3, 2, 1, 1, 1)] * 3
    expected = max_pool3d(x, 3, 2, 1)
    before, results = native.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            native.set_num_threads(count)
            y, spread = torch.empty_like(expected), torch.empty_like(x)
            taps = torch.empty_like(y, dtype=torch.uint8)
            native.pool_max_forward(x, y, taps, ORIGIN, ORIGIN, windows, False)
            native.pool_max_backward(y, taps, spread, ORIGIN, ORIGIN, windows)
            results.append((y, taps, spread))
    finally:
        native.set_num_threads(before)
    assert torch.equal(results[0][0], expected)
    for each in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(each, results[0], strict=True))


def test_refusals_name_what_was_given():
    x, y = torch.zeros(1, 4, 6, 6, 6), torch.zeros(1, 4, 3, 3, 3)
    taps = torch.zeros(y.shape, dtype=torch.uint8)
    windows = [native.Footprint(2, 2)] * 3
    forward, tail = native.pool_max_forward, (ORIGIN, ORIGIN, windows, False)
    assert "taps is int64" in refusal(forward, x, y, taps.long(), *tail)
    assert "taps is uint8 (1, 4, 3, 3, 2)" in refusal(forward, x, y, taps[..., :2], *tail)
    assert "int32" in refusal(forward, x.int(), y.int(), taps, *tail)
    wide = [native.Footprint(7, 2)] * 3
    assert "343 taps" in refusal(forward, x, y, taps, ORIGIN, ORIGIN, wide, False)
    shared = taps[:, :1].expand(taps.shape)
    assert "taps is uint8 (1, 4, 3, 3, 3)" in refusal(forward, x, y, shared, *tail)
    assert "stride 0" in refusal(
        native.pool_max_backward, y, taps, x[:, :1].expand(x.shape), *tail[:3]
    )
    assert "channels" in refusal(native.pool_max_pick, x[:, :3], taps, y, *tail)
