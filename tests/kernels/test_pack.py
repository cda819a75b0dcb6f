"""pack, unpack and unpack_add against their NumPy definitions."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist import _native as native
from support.kernels.arrays import refusal

NUMPY_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
]
DTYPES = [*NUMPY_DTYPES, torch.bfloat16]
CANARY = 77


def random_tensor(shape, dtype, generator):
    """Returns values whose sums are exact in every dtype that can hold them."""
    if dtype == torch.bool:
        return torch.from_numpy(generator.random(shape) < 0.5)
    return torch.from_numpy(generator.integers(0, 60, shape)).to(dtype)


def as_numpy(tensor):
    """Returns a NumPy view; for bfloat16, which NumPy lacks, of the bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@st.composite
def strided_views(draw, dtypes=DTYPES):
    """Draws a strided view inside a larger allocation, and boxes in it.

    Returns:
        (full allocation, the view as a function of such an allocation, boxes as (lo, hi)).
    """
    ndim = draw(st.integers(1, 5))
    shape = [draw(st.integers(1, 9)) for _ in range(ndim)]
    order = draw(st.permutations(range(ndim)))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in range(ndim)]
    margin = [draw(st.integers(0, 2)) for _ in range(ndim)]
    outer = [n * s + m for n, s, m in zip(shape, steps, margin, strict=True)]
    dtype = draw(st.sampled_from(dtypes))
    whole = random_tensor(outer, dtype, np.random.default_rng(draw(st.integers(0, 99))))

    def view_of(base):
        index = tuple(slice(m, None, s) for m, s in zip(margin, steps, strict=True))
        return base[index].permute(*order)

    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        ends = [
            sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in view_of(whole).shape
        ]
        boxes.append(tuple(zip(*ends, strict=True)))
    return whole, view_of, boxes


def regions_of(boxes):
    return native.Regions([native.Box(lo, hi) for lo, hi in boxes])


@settings(deadline=None)
@given(strided_views())
def test_pack_equals_reference_and_stays_inside_the_buffer(packing, case):
    whole, view_of, boxes = case
    regions = regions_of(boxes)
    expected = packing.pack(as_numpy(view_of(whole)), boxes)
    assert regions.elements == expected.size
    assert regions.count == len(boxes)
    padded = torch.full((expected.size + 6,), CANARY, dtype=torch.float64).to(whole.dtype)
    before = padded.clone()
    native.pack(view_of(whole), regions, padded[3:-3])
    np.testing.assert_array_equal(as_numpy(padded[3:-3]), expected)
    assert torch.equal(padded[:3], before[:3])
    assert torch.equal(padded[-3:], before[-3:])


@settings(deadline=None)
@given(strided_views(), st.booleans())
def test_unpack_equals_reference_and_touches_nothing_else(packing, case, misalign):
    whole, view_of, boxes = case
    regions = regions_of(boxes)
    buffer = random_tensor(regions.elements + misalign, whole.dtype, np.random.default_rng(1))
    expected = whole.clone()
    packing.unpack(as_numpy(buffer)[int(misalign) :], boxes, as_numpy(view_of(expected)))
    native.unpack(buffer[int(misalign) :], regions, view_of(whole))
    np.testing.assert_array_equal(as_numpy(whole), as_numpy(expected))


@settings(deadline=None)
@given(strided_views(NUMPY_DTYPES))
def test_unpack_add_equals_reference_and_touches_nothing_else(packing, case):
    whole, view_of, boxes = case
    regions = regions_of(boxes)
    buffer = random_tensor(regions.elements, whole.dtype, np.random.default_rng(1))
    expected = whole.clone()
    packing.unpack_add(buffer.numpy(), boxes, view_of(expected).numpy())
    native.unpack_add(buffer, regions, view_of(whole))
    np.testing.assert_array_equal(whole.numpy(), expected.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_add_in_fp32_and_round_once(dtype):
    torch.manual_seed(0)
    scale = torch.tensor([1e-6, 1.0, 3e4]).repeat(100)
    a, b = ((torch.randn(300) * scale).to(dtype) for _ in range(2))
    expected = (a.float() + b.float()).to(dtype)
    native.unpack_add(b, regions_of([((0,), (300,))]), a)
    assert torch.equal(a, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_add_special_values_as_torch(dtype):
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 6e-8, 65504.0, 1.0])
    a, b = (t.reshape(-1).to(dtype) for t in torch.meshgrid(values, values, indexing="ij"))
    expected = (a.float() + b.float()).to(dtype)
    native.unpack_add(b, regions_of([((0,), (len(a),))]), a)
    torch.testing.assert_close(a, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(a)[~a.isnan()], torch.signbit(expected)[~a.isnan()])


FACES = {
    "depth": ((0, 0, 3, 0, 0), (1, 4, 4, 40, 48)),
    "height": ((0, 0, 0, 38, 0), (1, 4, 36, 40, 48)),
    "width": ((0, 0, 0, 0, 47), (1, 4, 36, 40, 48)),
    "wide_width": ((0, 0, 0, 0, 46), (1, 4, 36, 40, 48)),
    "crop": ((0, 1, 2, 3, 4), (1, 4, 30, 31, 41)),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("misaligned", [0, 1, 2])
def test_faces_that_fill_several_runs_and_threads(
    packing, face, memory_format, misaligned, threads
):
    x = torch.arange(4 * 36 * 40 * 48, dtype=torch.float32).reshape(1, 4, 36, 40, 48)
    x = x.contiguous(memory_format=memory_format)
    boxes = [FACES[face], FACES["crop"]]
    regions = regions_of(boxes)
    buffer = torch.empty(regions.elements + misaligned)[misaligned:]
    native.pack(x, regions, buffer)
    np.testing.assert_array_equal(buffer.numpy(), packing.pack(x.numpy(), boxes))
    y = torch.zeros_like(x, memory_format=torch.preserve_format)
    expected = y.numpy().copy()
    native.unpack(buffer, regions, y)
    packing.unpack(buffer.numpy(), boxes, expected)
    np.testing.assert_array_equal(y.numpy(), expected)
    native.unpack_add(buffer, regions, y)
    packing.unpack_add(buffer.numpy(), boxes, expected)
    np.testing.assert_array_equal(y.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [3, 16, 25, 32])
@pytest.mark.parametrize("skipped", [0, 1])
def test_voxels_are_short_pieces(packing, dtype, channels, skipped):
    """A face with channels last: contiguous voxels of `channels` elements, far apart."""
    generator = np.random.default_rng(channels)
    whole = random_tensor((3, 41, 5, channels + skipped), dtype, generator)
    x = whole[..., skipped:]
    boxes = [((0, 1, 2, 0), (3, 40, 3, channels)), ((1, 0, 4, 0), (3, 41, 5, channels - 1))]
    regions = regions_of(boxes)
    buffer = random_tensor((skipped + regions.elements,), dtype, generator)
    first = buffer[:skipped].clone()
    native.pack(x, regions, buffer[skipped:])
    expected = packing.pack(as_numpy(x), boxes)
    np.testing.assert_array_equal(as_numpy(buffer[skipped:]), expected)
    assert torch.equal(buffer[:skipped], first)
    y = random_tensor(whole.shape, dtype, generator)
    z = y.clone()
    packing.unpack(expected, boxes, as_numpy(z[..., skipped:]))
    native.unpack(buffer[skipped:], regions, y[..., skipped:])
    assert torch.equal(y, z)
    for lo, hi in boxes:  # disjoint: each element is doubled
        z[..., skipped:][tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] *= 2
    native.unpack_add(buffer[skipped:], regions, y[..., skipped:])
    assert torch.equal(y, z)


def test_sums_of_overlapping_boxes_are_in_box_order_for_any_number_of_threads():
    torch.manual_seed(0)
    # In fp32 the order matters: 1e8 + 1 - 1e8 is 0, 1e8 - 1e8 + 1 is 1.
    boxes = [((0, 0), (300, 400))] * 3
    parts = [torch.full((120_000,), v) for v in (1e8, 1.0, -1e8)]
    for order, expected in [((0, 1, 2), 0.0), ((0, 2, 1), 1.0)]:
        for count in (1, 2, 3):
            native.set_num_threads(count)
            y = torch.zeros(300, 400)
            native.unpack_add(torch.cat([parts[i] for i in order]), regions_of(boxes), y)
            assert torch.equal(y, torch.full_like(y, expected))


def test_callers_in_several_threads_do_not_disturb_each_other():
    native.set_num_threads(2)
    regions = regions_of([((0, 0), (200, 999))])
    results = {}

    def work(rank):
        x = torch.full((200, 1000), float(rank))
        buffer = torch.empty(regions.elements)
        for _ in range(20):
            native.pack(x, regions, buffer)
        results[rank] = bool((buffer == rank).all())

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == dict.fromkeys(range(4), True)


def test_refusals_name_what_was_given():
    x = torch.zeros(4, 5)
    regions = regions_of([((0, 0), (2, 3))])
    assert "float64" in refusal(native.pack, x, regions, torch.zeros(6, dtype=torch.float64))
    assert "6 elements" in refusal(native.pack, x, regions, torch.zeros(5))
    assert "contiguous" in refusal(native.pack, x, regions, torch.zeros(12)[::2])
    assert "buffer" in refusal(native.pack, x, regions, torch.zeros(2, 3))
    message = refusal(native.pack, torch.zeros(4, 2), regions, torch.zeros(6))
    assert "Box((0, 0), (2, 3))" in message
    assert "(4, 2)" in message
    assert "2 dims" in refusal(native.pack, torch.zeros(4), regions, torch.zeros(6))
    message = refusal(native.unpack, torch.zeros(6), regions, torch.zeros(4, 1).expand(4, 5))
    assert "stride 0 in dim 1" in message
    assert "stride 0" in refusal(
        native.unpack_add, torch.zeros(6), regions, torch.zeros(4, 1).expand(4, 5)
    )
    assert "dims" in refusal(regions_of, [((0,), (1,)), ((0, 0), (1, 1))])
    assert "0" in refusal(native.set_num_threads, 0)


def test_expanded_tensors_may_be_read():
    regions = regions_of([((1, 1), (4, 5))])
    buffer = torch.empty(12)
    native.pack(torch.arange(4.0)[:, None].expand(4, 5), regions, buffer)
    assert torch.equal(buffer.view(3, 4), torch.arange(1.0, 4.0)[:, None].expand(3, 4))


def test_nothing_to_do_is_allowed():
    empty = torch.empty(0)
    native.pack(torch.zeros(3), regions_of([]), empty)
    native.unpack_add(empty, regions_of([((1,), (1,))]), torch.zeros(3))
    native.unpack(empty, regions_of([((0, 0), (0, 4))]), torch.zeros(0, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_may_start_anywhere(dtype):
    """A message is a slice of an exchange's buffer: aligned to its dtype, to nothing more."""
    box = native.Regions([native.Box([0, 0, 0], [17, 6, 2])])
    whole = random_tensor((1 + box.elements,), dtype, np.random.default_rng(0))
    view = torch.zeros(17, 6, 4, dtype=dtype)
    native.unpack(whole[1:], box, view)
    assert torch.equal(view[:, :, :2].reshape(-1), whole[1:])
    packed = torch.zeros_like(whole)[1:]
    native.pack(view, box, packed)
    assert torch.equal(packed, whole[1:])
