"""Sums over pooling windows give equal results on all code paths.

The paths differ in threads, stores past the caches, instruction sets, and a fused ReLU.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import avg_pool3d

from pydist import _native as native
from support.kernels.instruction_sets import assert_all_agree
from support.kernels.pool_sums import ORIGIN, Pooling, assert_near, footprints


def large_case(dtype, channels_last):
    """Returns a case with several tasks, channel blocks and buffer lines."""
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
    """Such targets are written past the caches, in full vectors."""
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
    assert_all_agree(ISA_SCRIPT, rtol=1e-4)


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
