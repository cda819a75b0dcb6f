"""CUDA kernels against the CPU ones, which tests/kernels compares with NumPy."""

from __future__ import annotations

import pytest
import torch

from pydist import _native as native

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
SHAPE = (2, 5, 21, 34, 47)
FACES = [
    ((0, 0, 0, 0, 0), (2, 5, 1, 34, 47)),
    ((0, 0, 0, 33, 0), (2, 5, 21, 34, 47)),
    ((0, 0, 0, 0, 45), (2, 5, 21, 34, 47)),
    ((1, 2, 3, 4, 5), (2, 4, 20, 21, 44)),
]


def values(shape, dtype):
    torch.manual_seed(0)
    return torch.randint(0, 2 if dtype == torch.bool else 50, shape).to(dtype)


def regions_of(boxes):
    return native.Regions([native.Box(lo, hi) for lo, hi in boxes])


def permuted(x, order):
    """Returns the same values in another memory order."""
    inverse = [order.index(dim) for dim in range(x.ndim)]
    return x.permute(*order).contiguous().permute(*inverse)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 2, 3, 4, 1), (4, 2, 0, 3, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("misaligned", [0, 1])
def test_packing_equals_the_cpu(dtype, order, misaligned):
    x = permuted(values(SHAPE, dtype), list(order))
    regions = regions_of(FACES)
    on_cpu = torch.zeros(regions.elements, dtype=dtype)
    native.pack(x, regions, on_cpu)
    device = permuted(x.cuda(), list(order))
    buffer = torch.zeros(regions.elements + misaligned, dtype=dtype, device="cuda")[misaligned:]
    native.pack(device, regions, buffer)
    assert torch.equal(buffer.cpu(), on_cpu)
    for kernel in (native.unpack, native.unpack_add):
        kernel(on_cpu, regions, x)
        kernel(buffer, regions, device)
        assert torch.equal(device.cpu(), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 25, 32])
@pytest.mark.parametrize("skipped", [0, 1])
def test_packing_voxels_equals_the_cpu(dtype, channels, skipped):
    """Faces with channels last: short pieces, aligned to 16 bytes or to one element."""
    x = values((2, 33, 35, 9, channels + skipped), dtype)
    boxes = [
        ((0, 0, 0, 8, 0), (2, 33, 35, 9, channels)),
        ((0, 0, 34, 0, 0), (2, 33, 35, 8, channels)),
        ((1, 2, 3, 4, 1), (2, 31, 34, 5, channels - 1)),
    ]
    regions = regions_of(boxes)
    device = x.cuda()
    on_cpu = torch.zeros(regions.elements, dtype=dtype)
    native.pack(x[..., skipped:], regions, on_cpu)
    buffer = torch.zeros(regions.elements + skipped, dtype=dtype, device="cuda")[skipped:]
    native.pack(device[..., skipped:], regions, buffer)
    assert torch.equal(buffer.cpu(), on_cpu)
    other = values((regions.elements + skipped,), dtype)[skipped:]
    buffer.copy_(other)
    for kernel in (native.unpack, native.unpack_add):
        kernel(other, regions, x[..., skipped:])
        kernel(buffer, regions, device[..., skipped:])
        assert torch.equal(device.cpu(), x)


def test_more_boxes_than_fit_into_one_launch():
    x = torch.arange(300.0 * 7).reshape(300, 7)
    boxes = [((i, i % 3), (i + 1, 4 + i % 4)) for i in range(300)]
    regions = regions_of(boxes)
    on_cpu = torch.empty(regions.elements)
    native.pack(x, regions, on_cpu)
    buffer = torch.empty(regions.elements, device="cuda")
    native.pack(x.cuda(), regions, buffer)
    assert torch.equal(buffer.cpu(), on_cpu)


def test_kernels_run_on_the_current_stream_and_can_be_captured():
    x = torch.rand(SHAPE, device="cuda")
    regions = regions_of(FACES)
    buffer = torch.zeros(regions.elements, device="cuda")
    native.pack(x, regions, buffer)  # loads the kernels, which can't be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.pack(x, regions, buffer)
    buffer.zero_()
    x.add_(1)
    graph.replay()
    expected = torch.empty(regions.elements)
    native.pack(x.cpu(), regions, expected)
    assert torch.equal(buffer.cpu(), expected)


TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("thin", [0, 1, 2])
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 1), (1, 2, 3)])
def test_boundary_convolution_equals_the_cpu(dtype, thin, stride, dilation, groups):
    torch.manual_seed(0)
    slab = [30, 33, 29]
    slab[thin] = 2
    outs = [(n + stride - 1) // stride for n in slab]
    outs[thin] = 3
    x = torch.randn(2, 6, *slab).to(dtype)
    w = torch.randn(36, 6 // groups, 3, 3, 3).to(dtype)
    y = torch.randn(2, 36, *outs).to(dtype)
    lo = (0, 0, 0)
    tail = (lo, lo, (stride,) * 3, (dilation,) * 3, (dilation,) * 3, groups)
    kernels = [
        (native.boundary_conv_forward, x, w, y),
        (native.boundary_conv_dgrad, y, w, x),
        (native.boundary_conv_wgrad, x, y, w),
    ]
    for kernel, first, second, target in kernels:
        on_cpu, on_gpu = target.clone(), target.cuda()
        kernel(first, second, on_cpu, *tail)
        kernel(first.cuda(), second.cuda(), on_gpu, *tail)
        scale = float(on_cpu.abs().max())
        error = float((on_gpu.cpu().double() - on_cpu.double()).abs().max())
        assert error <= TOLERANCE[dtype] * scale, kernel
        again = target.cuda()
        kernel(first.cuda(), second.cuda(), again, *tail)
        assert torch.equal(again, on_gpu), "not deterministic"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("slope", [1.0, 0.0, 0.25])
def test_pool_sums_equal_the_cpu(dtype, layout, accumulate, slope):
    torch.manual_seed(0)
    x = torch.randn(2, 20, 13, 18, 41).to(dtype).contiguous(memory_format=layout)
    y = torch.randn(2, 20, 7, 9, 21).to(dtype).contiguous(memory_format=layout)
    scales = [torch.rand(n, dtype=torch.float64) for n in y.shape[2:]]
    windows = [native.Footprint(k, 2, 1, p, p) for k, p in ((3, 1), (4, 1), (3, 2))]
    attributes = ((1, 0, -1), (0, 1, 0), windows)
    swapped = (attributes[1], attributes[0], windows)
    gates = (None, None) if slope == 1 else (x.flip(0), x.flip(0).cuda())
    for kernel, source, target, tail, rectifier in [
        (native.pool_sum_forward, x, y, attributes, [(slope,)] * 2),
        (native.pool_sum_backward, y, x, swapped, [(gate, slope) for gate in gates]),
    ]:
        on_cpu, on_gpu = target.clone(), target.cuda()
        kernel(source, on_cpu, *tail, scales, accumulate, *rectifier[0])
        on_device = [s.cuda() for s in scales]
        kernel(source.cuda(), on_gpu, *tail, on_device, accumulate, *rectifier[1])
        error = float((on_gpu.cpu().double() - on_cpu.double()).abs().max())
        assert error <= TOLERANCE[dtype] * float(on_cpu.abs().max()), kernel


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("tap_dtype", [torch.uint8, torch.int32])
def test_maxima_equal_the_cpu(dtype, layout, tap_dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 20, 13, 18, 41).round().to(dtype).contiguous(memory_format=layout)
    x[0, 0, :, 3] = torch.nan
    y = torch.randn(2, 20, 7, 9, 21).to(dtype).contiguous(memory_format=layout)
    windows = [native.Footprint(k, 2, d, p, p) for k, d, p in ((3, 1, 1), (4, 1, 1), (3, 2, 1))]
    if tap_dtype is torch.int32:
        windows = [
            native.Footprint.adaptive(n + 1, m + 1)
            for n, m in zip(x.shape[2:], y.shape[2:], strict=True)
        ]
    source_lo, out_lo = (1, 0, 1), (0, 1, 0)

    def results(device):
        source, out, grad = x.to(device), torch.empty_like(y, device=device), y.to(device)
        taps = torch.empty_like(out, dtype=tap_dtype)
        spread, picked = torch.empty_like(source), torch.empty_like(out)
        native.pool_max_forward(source, out, taps, source_lo, out_lo, windows, False)
        native.pool_max_forward(source, out, taps, (0, 0, 0), out_lo, windows, True)
        native.pool_max_backward(grad, taps, spread, out_lo, source_lo, windows)
        native.pool_max_pick(source, taps, picked, source_lo, out_lo, windows, False)
        return [t.cpu() for t in (out, taps, picked, spread)]

    *chosen, spread = zip(results("cpu"), results("cuda"), strict=True)
    for on_cpu, on_gpu in chosen:
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=0, equal_nan=True)
    error = float((spread[1].double() - spread[0].double()).abs().max())
    assert error <= TOLERANCE[dtype] * float(spread[0].abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keyed_uniform_is_bit_identical_to_the_cpu(dtype):
    on_cpu = torch.empty(3, 50, 70, dtype=dtype)
    on_gpu = on_cpu.cuda()
    for out in (on_cpu, on_gpu):
        native.keyed_uniform(out, 2**63 + 5, [1, 2, 3], [2**20, 2**21, 100])
    assert torch.equal(on_gpu.cpu(), on_cpu)


def test_tensors_on_different_devices_are_refused():
    regions = regions_of([((0,), (4,))])
    with pytest.raises(ValueError, match="cuda:0"):
        native.pack(torch.zeros(4, device="cuda"), regions, torch.zeros(4))
