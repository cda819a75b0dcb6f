"""Keyed random numbers: the published vectors, and equal values for any split of an array."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist import _native as native
from support.kernels.arrays import refusal

MASK = 0xFFFFFFFF


def philox4x32_10(counter, key):
    """Computes Philox 4x32-10 of Salmon et al. (2011), in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def test_definition_gives_the_vectors_of_random123():
    assert philox4x32_10([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32_10([MASK] * 4, [MASK] * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def expected_uniform(key, counter, dtype):
    words = philox4x32_10([counter & MASK, counter >> 32, 0, 0], [key & MASK, key >> 32])
    if dtype == torch.float32:
        return (words[0] >> 8) * 2.0**-24
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("key", "first"), [(0, 0), (2**64 - 1, 2**62), (12345, 2**32 - 5)])
def test_values_are_philox_of_key_and_index(dtype, key, first):
    out = torch.empty(1, 40, dtype=dtype)
    native.keyed_uniform(out, key, [0, first], [1, 2**62 + 40])
    assert out[0].tolist() == [expected_uniform(key, first + i, dtype) for i in range(40)]


@settings(deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.float64]))
def test_a_cut_changes_nothing(data, dtype):
    ndim = data.draw(st.integers(1, 5))
    shape = [data.draw(st.integers(1, 7)) for _ in range(ndim)]
    whole = torch.empty(shape, dtype=dtype)
    native.keyed_uniform(whole, 99, [0] * ndim, shape)
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    lo = [a for a, _ in ends]
    order = data.draw(st.permutations(range(ndim)))
    memory = torch.full([ends[d][1] - ends[d][0] for d in order] + [2], -1.0, dtype=dtype)
    part = memory[..., 0].permute(*np.argsort(order).tolist())
    native.keyed_uniform(part, 99, lo, shape)
    assert torch.equal(part, whole[tuple(slice(a, b) for a, b in ends)])
    assert bool((memory[..., 1] == -1).all())


def test_threads_change_nothing_and_the_distribution_is_uniform(threads):
    out = torch.empty(64, 4096)
    native.keyed_uniform(out, 3, [0, 0], [64, 4096])
    assert float(out.min()) >= 0.0
    assert float(out.max()) < 1.0
    counts = torch.histc(out, 64, 0.0, 1.0)
    chi2 = float(((counts - 4096) ** 2 / 4096).sum())
    assert 20 < chi2 < 130  # 63 degrees of freedom: outside with probability below 1e-6
    assert out[5, 7].item() == expected_uniform(3, 5 * 4096 + 7, torch.float32)
    other = torch.empty_like(out)
    native.keyed_uniform(other, 4, [0, 0], [64, 4096])
    assert abs(float(torch.corrcoef(torch.stack([out.flatten(), other.flatten()]))[0, 1])) < 0.01


def test_refusals_name_what_was_given():
    out = torch.zeros(4, 5)
    assert "float16" in refusal(native.keyed_uniform, out.half(), 0, [0, 0], [4, 5])
    assert "(1, 0)" in refusal(native.keyed_uniform, out, 0, [1, 0], [4, 5])
    assert "(4,)" in refusal(native.keyed_uniform, out, 0, [0, 0], [4])
    assert "64 bits" in refusal(native.keyed_uniform, out, 0, [0, 0], [2**40, 2**40])
