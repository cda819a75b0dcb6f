"""Conversion of stored numbers to inputs in one pass: against NumPy, in any layout, with NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pydist import _native as native
from support.kernels.conversions import IDENTITY, INPUTS, MAPS, SMALL, WIDE, block, flag, table


@pytest.mark.parametrize("out_dtype", INPUTS)
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("divisor", [1.0, 3.7])
def test_look_up_is_the_tables_entry(threads, dtype, out_dtype, divisor):
    stored = block(dtype, (3, 40, 50, 70))
    if dtype.startswith("int"):
        stored[0] -= 60
    entries = table(stored, out_dtype)
    out, found = np.full(stored.shape, np.nan, out_dtype), flag()
    native.look_up(stored, entries, divisor, out, found)
    index = stored.astype(np.int64) % entries.shape[1]
    expected = np.stack([t[i] for t, i in zip(entries, index, strict=True)])
    np.testing.assert_array_equal(out, expected / np.asarray(divisor, out_dtype))
    assert not found[0]


@pytest.mark.parametrize("out_dtype", INPUTS)
@pytest.mark.parametrize("dtype", SMALL + WIDE)
@pytest.mark.parametrize("log", [False, True])
def test_rescaling_rounds_as_numpy_does(threads, dtype, out_dtype, log):
    stored = block(dtype)
    out, found = np.full(stored.shape, np.nan, out_dtype), flag()
    native.rescale(stored, MAPS, log, 1.5, out, found)
    expected = stored.astype(out_dtype)
    for c, (lower, upper, shift, scale) in enumerate(MAPS):
        np.clip(expected[c], lower, upper, out=expected[c])
        if log:
            expected[c] = np.log1p(expected[c].astype(np.float64))
        expected[c] -= shift
        expected[c] /= scale
        expected[c] /= np.asarray(1.5, out_dtype)
    if log:
        np.testing.assert_allclose(out, expected, rtol=4 * np.finfo(out_dtype).eps, atol=1e-6)
    else:
        np.testing.assert_array_equal(out, expected)
    assert not found[0]


@given(st.lists(st.floats(-1, 2.0**127, width=32), min_size=1, max_size=40))
def test_logarithms_are_within_a_unit_in_the_last_place(values):
    stored = np.array(values, np.float32).reshape(1, 1, 1, -1)
    out, found = np.empty_like(stored), flag()
    native.rescale(stored, IDENTITY, True, 1.0, out, found)
    with np.errstate(divide="ignore"):
        exact = np.log1p(stored.astype(np.float64))
    assert bool(found[0]) == bool(np.isinf(exact).any())
    finite = np.isfinite(exact)
    error = np.abs(out[finite].astype(np.float64) - exact[finite])
    assert (error <= 0.5001 * np.spacing(np.abs(exact[finite]).astype(np.float32))).all()
    assert (out[~finite] == -np.inf).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.0])
def test_what_has_no_logarithm_is_found(value):
    stored = np.ones((1, 2, 3, 67), np.float32)
    stored[0, 1, 2, 65] = value
    out, found = np.empty_like(stored), flag()
    native.rescale(stored, IDENTITY, True, 1.0, out, found)
    assert found[0] == 1
    assert np.isfinite(out).sum() == stored.size - 1
    entries = np.zeros((1, 256), np.float32)
    entries[0, 7] = value if not math.isfinite(value) else math.nan
    counts = np.full((1, 2, 3, 67), 6, np.uint8)
    found = flag()
    native.look_up(counts, entries, 1.0, out, found)
    assert found[0] == 0
    counts[0, 1, 2, 66] = 7
    native.look_up(counts, entries, 1.0, out, found)
    assert found[0] == 1


@given(order=st.permutations(range(4)), out_order=st.permutations(range(4)), seed=st.integers(0, 9))
def test_any_memory_order(order, out_order, seed):
    """The target may be a view of a larger tensor: its surroundings stay unchanged."""
    shape = np.random.default_rng(seed).integers(1, 7, 4)
    stored = np.moveaxis(block("int16", [shape[d] for d in order], seed), range(4), order)
    room = np.full([shape[d] + 1 for d in out_order], -1.0, np.float32)
    out = np.moveaxis(room, range(4), out_order)[tuple(slice(0, n) for n in shape)]
    maps = np.tile(IDENTITY, (shape[0], 1))
    native.rescale(stored, maps, False, 1.0, out, flag())
    np.testing.assert_array_equal(out, stored)
    assert (room == -1).sum() == room.size - out.size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stored": np.zeros((1, 2, 2), np.int16)}, "stored"),
        ({"stored": np.zeros((1, 2, 2, 2), np.float32)}, "8 and 16 bit integers"),
        ({"table": np.zeros((1, 256), np.float32)}, "one entry for each channel and value"),
        ({"table": np.zeros((1, 65536))}, "float64"),
        ({"out": np.zeros((1, 2, 2, 3), np.float32)}, "differ in shape"),
        ({"out": np.zeros((1, 2, 2, 2), np.int32)}, "float32 and float64"),
        ({"found": np.zeros(2, np.int32)}, "one int32"),
        ({"out": torch.zeros(1, 2, 2, 1).expand(1, 2, 2, 2)}, "stride 0"),
    ],
)
def test_refusals_name_what_was_given(change, message):
    given = {
        "stored": np.zeros((1, 2, 2, 2), np.int16),
        "table": np.zeros((1, 65536), np.float32),
        "divisor": 1.0,
        "out": np.zeros((1, 2, 2, 2), np.float32),
        "found": flag(),
    }
    native.look_up(**given)
    with pytest.raises(ValueError, match=message):
        native.look_up(**{**given, **change})


def test_rescale_wants_four_numbers_a_channel():
    stored = np.zeros((2, 2, 2, 2), np.int32)
    with pytest.raises(ValueError, match=r"float64 \(channels, 4\)"):
        native.rescale(stored, IDENTITY, False, 1.0, stored.astype(np.float32), flag())
