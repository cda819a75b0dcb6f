"""Statistics of rows: of blocks, of parts and of the whole; against two passes in fp64."""

from __future__ import annotations

import pytest
import torch
from equivalence import randn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pydist.ops.normalization import statistics
from pydist.ops.normalization.statistics import (
    Moments,
    combine,
    dense,
    gradient_sums,
    merged,
    moments,
    strided_like,
)

FORMATS = {
    "plain": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "neither": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
shapes = st.lists(st.integers(1, 6), min_size=2, max_size=5).map(tuple)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 16 elements, so that small tensors have many."""
    monkeypatch.setattr(statistics, "BLOCK", 16)


def two_passes(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.double().movedim(1, 0).flatten(1)
    return rows.mean(1), (rows - rows.mean(1, keepdim=True)).square().sum(1)


def stacked(parts: list[Moments]) -> Moments:
    return Moments(*(torch.stack(each) for each in zip(*parts, strict=True)))


@pytest.mark.parametrize("change", FORMATS.values(), ids=FORMATS)
@given(shape=shapes)
def test_moments(change, shape):
    x = dense(change(randn(*shape) + 1000))
    found, (mean, m2) = moments(x), two_passes(x)
    assert found.n == x.numel() // x.shape[1]
    torch.testing.assert_close(found.mean, mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.m2, m2, rtol=1e-11, atol=1e-18)


@given(extents=st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any))
def test_parts_merge_to_the_whole(extents):
    """Parts of unequal size, empty ones among them."""
    x = randn(sum(extents), 3, 4) + 1000
    found = merged(stacked([moments(part) for part in x.split(extents)]))
    mean, m2 = two_passes(x)
    assert found.n == x.numel() // 3
    torch.testing.assert_close(found.mean, mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.m2, m2, rtol=1e-11, atol=0)


def test_nothing_merges_to_nothing():
    found = merged(stacked([moments(torch.empty(2, 3, 0))] * 2))
    assert found.n == 0
    assert not found.mean.any()
    assert not found.m2.any()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_a_million_float32_values_keep_their_digits(memory_format, monkeypatch):
    """Where torch's channels-last batch norm has errors of 1e-4 in mean and variance."""
    monkeypatch.undo()
    x = (randn(1, 2, 128, 128, 64) + 10).float().to(memory_format=memory_format)
    found, (mean, m2) = moments(x), two_passes(x)
    torch.testing.assert_close(found.mean, mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(found.m2, m2, rtol=1e-7, atol=0)


@pytest.mark.parametrize("change", FORMATS.values(), ids=FORMATS)
@given(shape=shapes)
def test_sums_and_combination_of_gradient_and_input(change, shape):
    x = dense(change(randn(*shape)))
    grad = strided_like(randn(*shape, seed=1), x)
    mean, a, b, c = (randn(shape[1], seed=seed) for seed in (2, 3, 4, 5))
    per_channel = [v.view(1, -1, *(1 for _ in shape[2:])) for v in (mean, a, b, c)]
    over = [d for d in range(len(shape)) if d != 1]
    expected = torch.stack([grad.sum(over), (grad * (x - per_channel[0])).sum(over)])
    torch.testing.assert_close(gradient_sums(grad, x, mean), expected, rtol=1e-12, atol=1e-12)
    expected = per_channel[1] * grad + per_channel[2] * x + per_channel[3]
    found = torch.empty_like(x)
    combine(found, grad, x, a, b, c)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 30, 4), (1, 3, 40)])
def test_narrow_values_are_combined_in_float32_and_rounded_once(shape):
    x, grad = (randn(*shape, seed=seed).bfloat16() for seed in (0, 1))
    a, b, c = (randn(shape[1], seed=seed).float() for seed in (3, 4, 5))
    a3, b3, c3 = (v.view(1, -1, 1) for v in (a, b, c))
    expected = (c3 + b3 * x.float()) + a3 * grad.float()
    found = torch.empty_like(x)
    combine(found, grad, x, a, b, c)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0, atol=0)
