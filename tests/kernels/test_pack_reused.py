"""One Regions object for many tensors: its cached state must not leak into the next call."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist import _native as native
from pydist.errors import UsageError

SHAPE = (3, 4, 5)
BOXES = [((0, 1, 1), (3, 3, 5)), ((1, 0, 2), (2, 4, 4))]


def regions_of(boxes, order=None):
    return native.Regions([native.Box(lo, hi) for lo, hi in boxes], order)


def expected_of(tensor, boxes, order=(0, 1, 2)):
    pieces = [tensor[tuple(map(slice, lo, hi))].permute(*order).reshape(-1) for lo, hi in boxes]
    return torch.cat(pieces)


def alike_but_elsewhere(kind, generator):
    """Returns tensors of one shape that differ in strides, alignment or dtype."""
    dtype = torch.float64 if kind == "double" else torch.float32
    values = torch.from_numpy(generator.integers(0, 99, SHAPE)).to(dtype)
    if kind == "reversed":
        return torch.empty(SHAPE[::-1], dtype=dtype).permute(2, 1, 0).copy_(values)
    if kind == "odd address":
        return torch.empty(1 + values.numel(), dtype=dtype)[1:].view(SHAPE).copy_(values)
    if kind == "gaps":
        return torch.empty(3, 4, 8, dtype=dtype)[..., :5].copy_(values)
    return values


KINDS = ["plain", "reversed", "odd address", "gaps", "double"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2)), min_size=2, max_size=8),
    st.permutations(range(3)),
)
def test_every_tensor_is_taken_as_it_lies(calls, order):
    regions, generator = regions_of(BOXES, order), np.random.default_rng(len(calls))
    for kind, shift in calls:
        view = alike_but_elsewhere(kind, generator)
        buffer = torch.zeros(shift + regions.elements, dtype=view.dtype)[shift:]
        native.pack(view, regions, buffer)
        assert torch.equal(buffer, expected_of(view, BOXES, order))

        target = torch.zeros_like(view)
        native.unpack(buffer, regions, target)
        inside = torch.zeros(SHAPE, dtype=torch.bool)
        for lo, hi in BOXES:
            inside[tuple(map(slice, lo, hi))] = True
        assert torch.equal(target, view * inside)

        native.unpack_add(buffer, regions, target)
        counts = sum(_indicator(lo, hi) for lo, hi in BOXES)
        assert torch.equal(target, view * inside + view * counts)


def _indicator(lo, hi):
    ones = torch.zeros(SHAPE, dtype=torch.int64)
    ones[tuple(map(slice, lo, hi))] = 1
    return ones


@pytest.mark.parametrize("call", ["pack", "unpack", "unpack_add"])
def test_checks_hold_after_a_tensor_that_fitted(call):
    regions = regions_of(BOXES)

    def run(view, buffer):
        if call == "pack":
            native.pack(view, regions, buffer)
        else:
            getattr(native, call)(buffer, regions, view)

    good, buffer = torch.zeros(SHAPE), torch.zeros(regions.elements)
    run(good, buffer)
    with pytest.raises(UsageError, match="does not lie in"):
        run(torch.zeros(SHAPE)[..., :4], buffer)
    with pytest.raises(UsageError, match="elements"):
        run(good, buffer[:-1])
    with pytest.raises(UsageError, match="contiguous"):
        run(good, torch.zeros(2 * regions.elements)[::2])
    with pytest.raises(UsageError, match="same dtype"):
        run(good, buffer.double())
    with pytest.raises(UsageError, match="dims"):
        run(torch.zeros(12, 5), buffer)
    if call != "pack":
        with pytest.raises(UsageError, match="stride 0"):
            run(torch.zeros(1, 4, 5).expand(SHAPE), buffer)
    run(good, buffer)


def test_threads_may_share_regions():
    """Each thread caches its results for the next one, which may have other strides."""
    regions, errors = regions_of([((0, 0, 0), (16, 64, 64))]), []
    plain = torch.randn(16, 64, 64)
    turned = plain.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    def work(view):
        buffer = torch.empty(regions.elements)
        for _ in range(50):
            native.pack(view, regions, buffer)
            if not torch.equal(buffer, plain.view(-1)):
                errors.append(view.stride())

    threads = [threading.Thread(target=work, args=(view,)) for view in (plain, turned, plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (-1, 0, 1)])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(UsageError, match="no permutation of 3 dims"):
        regions_of(BOXES, order)
