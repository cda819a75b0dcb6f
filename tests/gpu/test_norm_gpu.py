"""CUDA kernels of norms against the CPU ones."""

from __future__ import annotations

import pytest
import torch

from pydist.backend.statistics import (
    Transform,
    apply,
    combine,
    gradient_sums,
    moments,
    statistics_dtype,
)

# Relative to elements. Sums are formed in fp32, also for narrow types.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}
SHAPES = [(2, 5, 21, 34, 47), (3, 64, 8, 8, 8), (1, 33, 7), (2, 3, 0)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("slope", [1.0, 0.0, 0.1, "of each row"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_passes_equal_the_cpus(dtype, shape, slope, per_sample, channels_last):
    torch.manual_seed(0)
    x, grad = ((torch.randn(shape) + 10).to(dtype) for _ in range(2))
    if channels_last:
        x, grad = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, grad))
    rows = shape[0] * shape[1] if per_sample else shape[1]
    values, coefficients = (torch.randn(3, rows).to(statistics_dtype(dtype)) for _ in range(2))
    if slope == "of each row":
        values, slope = torch.cat([values, coefficients[:1]]), 1.0

    def results(device):
        on = [t.to(device) for t in (x, grad, values, coefficients)]
        out, grad_in = torch.empty_like(on[0]), torch.empty_like(on[0])
        found = moments(on[0], per_sample)
        transform = Transform(on[2], slope)
        apply(out, on[0], transform)
        combine(grad_in, on[1], on[0], transform, on[3])
        sums = gradient_sums(on[1], on[0], transform)
        return [t.cpu() for t in (*found, sums, out, grad_in)]

    *sums, out, grad_in = results("cuda")
    *expected_sums, expected_out, expected_grad = results("cpu")
    exact = min(TOLERANCE[dtype], 1e-5)
    size = max(1.0, *(t.abs().max().item() if t.numel() else 0.0 for t in expected_sums))
    for found, expected in zip(sums, expected_sums, strict=True):
        torch.testing.assert_close(found, expected, rtol=exact, atol=exact * size)
    # A value next to 0 may have the other sign on the device, where FMA rounds differently.
    tolerance = TOLERANCE[dtype]
    for found, expected in ((out, expected_out), (grad_in, expected_grad)):
        off = (found.double() - expected.double()).abs() > tolerance * (1 + expected.abs().double())
        assert off.double().sum() <= 1e-4 * off.numel()
