"""Tests of row statistics of blocks, parts and full tensors against two passes in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pydist.backend import statistics
from pydist.backend.statistics import (
    Moments,
    Rows,
    Transform,
    apply,
    combine,
    dense,
    gradient_sums,
    merged,
    moments,
    set_slopes,
    strided_like,
)
from support.equivalence import randn

FORMATS = {
    "plain": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "neither": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}
shapes = st.lists(st.integers(1, 6), min_size=2, max_size=5).map(tuple)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Reduces the part size to 16 elements, so that small tensors have many parts."""
    monkeypatch.setattr(statistics, "PART", 16)


def two_passes(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.double().movedim(1, 0).flatten(1)
    return rows.mean(1), (rows - rows.mean(1, keepdim=True)).square().sum(1)


def union_of(parts: list[Tensor]) -> Moments:
    """Returns the merged moments of tensors [N, C, ...]."""
    n = torch.tensor([[part.numel() / part.shape[1]] for part in parts], dtype=torch.float64)
    return Moments(*merged(Moments(n, *torch.stack([moments(part) for part in parts], 1))))


@pytest.mark.parametrize("change", FORMATS.values(), ids=FORMATS)
@given(shape=shapes)
def test_moments(change, shape):
    x = dense(change(randn(*shape) + 1000))
    (found_mean, found_m2), (mean, m2) = moments(x), two_passes(x)
    torch.testing.assert_close(found_mean, mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(found_m2, m2, rtol=1e-11, atol=1e-18)


@given(extents=st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any))
def test_parts_merge_to_the_whole(extents):
    """The parts have unequal sizes; some are empty."""
    x = randn(sum(extents), 3, 4) + 1000
    found = union_of(list(x.split(extents)))
    mean, m2 = two_passes(x)
    assert found.n.tolist() == [x.numel() // 3] * 3
    torch.testing.assert_close(found.mean, mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.m2, m2, rtol=1e-11, atol=0)


def test_nothing_merges_to_nothing():
    assert not torch.stack(union_of([torch.empty(2, 3, 0)] * 2)).any()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_a_million_float32_values_keep_their_digits(memory_format, monkeypatch):
    """torch's channels-last batch norm has errors of 1e-4 in mean and variance here."""
    monkeypatch.undo()
    x = (randn(1, 2, 128, 128, 64) + 10).float().to(memory_format=memory_format)
    (found_mean, found_m2), (mean, m2) = moments(x), two_passes(x)
    torch.testing.assert_close(found_mean, mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(found_m2, m2, rtol=1e-7, atol=0)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("slope", [1.0, 0.0, 0.1])
@pytest.mark.parametrize("change", FORMATS.values(), ids=FORMATS)
@given(shape=shapes)
def test_results_and_gradients_are_those_of_autograd(change, slope, per_sample, shape):
    x = dense(change(randn(*shape)))
    grad = strided_like(randn(*shape, seed=1), x)
    rows = shape[0] * shape[1] if per_sample else shape[1]
    leading = shape[:2] if per_sample else (1, shape[1])
    transform = Transform(randn(3, rows, seed=2), slope)
    coefficients = randn(3, rows, seed=3)
    mean, factor, offset, a, b, d = (
        v.view(*leading, *(1 for _ in shape[2:])) for v in (*transform.values, *coefficients)
    )
    linear = ((x - mean) * factor + offset).requires_grad_()
    result = F.leaky_relu(linear, slope)
    (g,) = torch.autograd.grad(result, linear, grad)
    found = torch.empty_like(x)
    apply(found, x, transform)
    torch.testing.assert_close(found, result, rtol=1e-12, atol=1e-12)
    sums = torch.stack([g, g * (x - mean)]).unsqueeze(-1).flatten(3).sum(-1)
    expected = sums.flatten(1) if per_sample else sums.sum(1)
    torch.testing.assert_close(gradient_sums(grad, x, transform), expected, rtol=1e-12, atol=1e-12)
    combine(found, grad, x, transform, coefficients)
    torch.testing.assert_close(found, a * g + b * (x - mean) + d, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("groups", "channels"), [(6, 6), (3, 6), (1, 6)])
@given(samples=st.integers(1, 3), voxels=st.integers(2, 9))
def test_rows_are_a_group_norm_and_its_gradients(
    affine, groups, channels, scale_dtype, samples, voxels
):
    x = (randn(samples, channels, voxels) + 3).requires_grad_()
    scale, shift = ((randn(channels, seed=i) + 2).to(scale_dtype) for i in (1, 2))
    own = [t.double().requires_grad_() for t in (scale, shift)] if affine else [None, None]
    y = F.group_norm(x, groups, *own, 1e-3)
    dy = randn(*y.shape, seed=3)
    expected = torch.autograd.grad(y, [x, *own] if affine else [x], dy)
    given_scale, given_shift = (scale, shift) if affine else (None, None)

    values_of_row = samples * channels * voxels // (samples * groups)
    by_row = moments(x.detach(), per_sample=True).view(2, samples * groups, -1).transpose(1, 2)
    n = torch.full((channels // groups, 1), values_of_row * groups / channels).double()
    found = merged(Moments(n, *by_row))
    rows = Rows(found, given_scale, 1e-3)
    values = rows.values(given_shift, samples * channels, torch.float64)
    out, grad = torch.empty_like(x), torch.empty_like(x)
    apply(out, x.detach(), Transform(values[:3]))
    torch.testing.assert_close(out, y.detach(), rtol=1e-12, atol=1e-12)
    sums = gradient_sums(dy, x.detach(), Transform(values[:3]))
    of_affine = torch.empty(2, channels, dtype=torch.float64)
    totals = rows.totals(values, sums, of_affine)
    combine(grad, dy, x.detach(), Transform(values[:3]), rows.coefficients(values, totals))
    torch.testing.assert_close(grad, expected[0], rtol=1e-10, atol=1e-11)
    if affine:
        torch.testing.assert_close(of_affine.flip(0), torch.stack(expected[1:]))


@pytest.mark.parametrize("slopes", [1, 3])
def test_slopes_are_those_of_the_channels(slopes):
    values, given_slopes = randn(4, 6), randn(slopes, seed=1).float()
    before = values[:3].clone()
    set_slopes(values, given_slopes)
    assert torch.equal(values[:3], before)
    assert torch.equal(values[3], given_slopes.double().repeat(6 // slopes))


def test_a_transform_far_from_zero_loses_no_digits():
    x = (randn(1, 2, 40, seed=1) + 1e4).float()
    n, mean = torch.ones(2, dtype=torch.float64), torch.full((2,), 1e4 + 1e-4, dtype=torch.float64)
    m2, found = randn(2).abs() + 1, torch.empty_like(x)
    values = Rows(torch.stack([n, mean, m2]), None, 0.0).values(None, 2, torch.float32)
    apply(found, x, Transform(values[:3]))
    expected = (x.double() - mean.view(-1, 1)) / m2.sqrt().view(-1, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 30, 4), (1, 3, 40)])
def test_narrow_values_are_combined_in_float32_and_rounded_once(shape, dtype):
    x, grad = (randn(*shape, seed=seed).to(dtype) for seed in (0, 1))
    transform = Transform(torch.zeros(3, shape[1]))
    coefficients = randn(3, shape[1], seed=3).float()
    a, b, d = (v.view(1, -1, 1) for v in coefficients)
    expected = a * grad.float() + (b * x.float() + d)
    found = torch.empty_like(x)
    combine(found, grad, x, transform, coefficients)
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)
