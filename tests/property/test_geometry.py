"""Box calculus, footprints and exchange plans against brute force over index sets."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pydist._native import Box, Footprint, Partition, Plan, plan_exchange, subtract


@st.composite
def intervals(draw, lo=-6, hi=12):
    start = draw(st.integers(lo, hi))
    return start, draw(st.integers(start, hi))


@st.composite
def boxes(draw, ndim=None):
    ndim = draw(st.integers(1, 3)) if ndim is None else ndim
    sides = [draw(intervals()) for _ in range(ndim)]
    return Box([lo for lo, _ in sides], [hi for _, hi in sides])


@st.composite
def partitions(draw, extent=None, max_parts=4):
    """Draws even or arbitrary split points; parts may be empty."""
    extent = draw(st.integers(0, 14)) if extent is None else extent
    parts = draw(st.integers(1, max_parts))
    if draw(st.booleans()):
        return Partition.even(extent, parts)
    cuts = draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1))
    return Partition([0, *sorted(cuts), extent])


@st.composite
def footprints(draw):
    return Footprint(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(-2, 5)),
        draw(st.integers(-2, 5)),
    )


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.lo, box.hi)))


def taps(footprint: Footprint, output: int) -> range:
    first = output * footprint.stride - footprint.padding_lo
    return range(first, first + (footprint.kernel - 1) * footprint.dilation + 1)


# Boxes -----------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 3))
def test_box_operations_are_set_operations(data, ndim):
    a, b = data.draw(boxes(ndim)), data.draw(boxes(ndim))
    assert indices(a.intersect(b)) == indices(a) & indices(b)
    assert a.volume == len(indices(a))
    assert a.empty == (not indices(a))
    assert a.contains(b) == (indices(b) <= indices(a))
    offset = data.draw(st.tuples(*[st.integers(-9, 9)] * ndim))
    assert indices(a.shift(offset)) == {
        tuple(i + o for i, o in zip(index, offset, strict=True)) for index in indices(a)
    }


@given(st.data(), st.integers(1, 3))
def test_subtract_covers_the_rest_disjointly(data, ndim):
    outer, inner = data.draw(boxes(ndim)), data.draw(boxes(ndim))
    slabs = subtract(outer, inner)
    assert len(slabs) <= 2 * ndim
    assert sum(slab.volume for slab in slabs) == len(indices(outer) - indices(inner))
    assert set().union(*map(indices, slabs)) == indices(outer) - indices(inner)


@given(st.one_of(boxes(), partitions(), footprints()))
def test_values_survive_pickling_and_hash_alike(value):
    copy = pickle.loads(pickle.dumps(value))
    assert copy == value
    assert hash(copy) == hash(value)
    assert value != "something else"
    assert type(value).__name__ in repr(value)


# Partitions ------------------------------------------------------------------------------------


@given(partitions())
def test_owner_inverts_interval(partition):
    owned = []
    for part in range(partition.parts):
        lo, hi = partition.interval(part)
        assert hi - lo == partition.sizes[part]
        assert all(partition.owner(index) == part for index in range(lo, hi))
        owned += range(lo, hi)
    assert owned == list(range(partition.extent))
    with pytest.raises(ValueError, match="outside the extent"):
        partition.owner(partition.extent)


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_parts_differ_by_one_and_larger_ones_come_first(extent, parts):
    sizes = Partition.even(extent, parts).sizes
    assert sum(sizes) == extent
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


# Footprints ------------------------------------------------------------------------------------


@given(footprints(), intervals())
def test_needs_is_the_span_of_all_taps(footprint, outputs):
    read = [index for output in range(*outputs) for index in taps(footprint, output)]
    lo, hi = footprint.needs(*outputs)
    assert (lo, hi) == (min(read), max(read) + 1) if read else lo == hi


@given(footprints(), intervals())
def test_feeds_is_the_adjoint_of_needs(footprint, inputs):
    wanted = set(range(*inputs))
    fed = {output for output in range(-60, 60) if wanted.intersection(taps(footprint, output))}
    assert set(range(*footprint.feeds(*inputs))) == fed


@given(footprints(), st.integers(0, 14))
def test_output_extent_is_that_of_torch(footprint, extent):
    padded = max(0, extent + footprint.padding_lo + footprint.padding_hi)
    span = (footprint.kernel - 1) * footprint.dilation + 1
    expected = 0
    if padded >= span:
        expected = torch.nn.functional.conv1d(
            torch.zeros(1, 1, padded),
            torch.zeros(1, 1, footprint.kernel),
            stride=footprint.stride,
            dilation=footprint.dilation,
        ).shape[2]
    assert footprint.output_extent(extent) == expected


@given(footprints(), partitions())
def test_outputs_belong_to_the_owner_of_their_center(footprint, partition):
    outputs = footprint.output_partition(partition)
    assert outputs.parts == partition.parts
    assert outputs.extent == footprint.output_extent(partition.extent)
    if partition.extent == 0:
        return
    for output in range(outputs.extent):
        center = (
            output * footprint.stride
            + ((footprint.kernel - 1) * footprint.dilation) // 2
            - footprint.padding_lo
        )
        clamped = min(max(center, 0), partition.extent - 1)
        assert outputs.owner(output) == partition.owner(clamped)


# Plans -----------------------------------------------------------------------------------------


class Exchange:
    """Arguments of an exchange, and the plans of all ranks."""

    def __init__(self, owned, needed, shape):
        self.owned, self.needed, self.shape = owned, needed, shape
        self.plans: list[Plan] = [plan_exchange(owned, needed, rank) for rank in range(len(owned))]

    def is_padding(self, index):
        return not all(0 <= i < extent for i, extent in zip(index, self.shape, strict=True))


@st.composite
def exchanges(draw):
    """Draws 1 to 3 split dims with uneven and empty shards, replicas, wide halos."""
    ndim = draw(st.integers(1, 3))
    largest = {1: 14, 2: 7, 3: 5}[ndim]
    splits = [
        draw(partitions(draw(st.integers(1, largest)), max_parts={1: 5, 2: 3, 3: 2}[ndim]))
        for _ in range(ndim)
    ]
    positions = list(itertools.product(*(range(split.parts) for split in splits)))
    positions *= draw(st.integers(1, 2))  # replicas
    owned = [shard(splits, position) for position in positions]
    if draw(st.booleans()):
        feet = [draw(footprints()) for _ in range(ndim)]
        needed = [[footprint_box(feet, splits, position)] for position in positions]
    else:
        slots = st.lists(boxes(ndim), max_size=2 if ndim < 3 else 1)
        needed = [draw(slots) for _ in positions]
    return Exchange(owned, needed, tuple(p.extent for p in splits))


def shard(splits, position):
    sides = [split.interval(part) for split, part in zip(splits, position, strict=True)]
    return Box([lo for lo, _ in sides], [hi for _, hi in sides])


def footprint_box(feet, splits, position):
    """Returns the inputs that a layer needs for the outputs of the rank at `position`."""
    sides = [
        foot.needs(*foot.output_partition(split).interval(part))
        for foot, split, part in zip(feet, splits, position, strict=True)
    ]
    return Box([lo for lo, _ in sides], [hi for _, hi in sides])


@given(exchanges())
def test_needed_is_owned_and_received_disjointly(exchange):
    for plan, needed in zip(exchange.plans, exchange.needed, strict=True):
        arrived = {slot: [] for slot in range(len(needed))}
        for transfer in incoming(plan):
            arrived[transfer.slot] += indices(transfer.box)
        for slot, box in enumerate(needed):
            wanted = [index for index in indices(box) if not exchange.is_padding(index)]
            assert sorted(arrived[slot]) == sorted(wanted)


@given(exchanges())
def test_every_send_has_one_equal_receive(exchange):
    sends = {(p.rank, m.peer): m.transfers for p in exchange.plans for m in p.sends}
    recvs = {(m.peer, p.rank): m.transfers for p in exchange.plans for m in p.recvs}
    assert sends == recvs
    for plan in exchange.plans:
        for messages in (plan.sends, plan.recvs):
            peers = [message.peer for message in messages]
            assert peers == sorted(set(peers))
            assert plan.rank not in peers
            assert all(message.elements > 0 for message in messages)
        outgoing = [t.box for m in plan.sends for t in m.transfers]
        assert all(exchange.owned[plan.rank].contains(box) for box in outgoing)


@given(exchanges())
def test_replicas_serve_themselves_and_are_chosen_by_receiver(exchange):
    for plan in exchange.plans:
        for message in plan.recvs:
            source = exchange.owned[message.peer]
            holders = [r for r, box in enumerate(exchange.owned) if box == source]
            assert plan.rank not in holders
            assert message.peer == holders[plan.rank % len(holders)]


@given(exchanges())
def test_exchanged_values_are_those_of_the_whole(exchange):
    whole = np.arange(1, np.prod(exchange.shape) + 1).reshape(exchange.shape)
    shards = [whole[box.slices] for box in exchange.owned]
    wires = {
        (plan.rank, message.peer): np.concatenate(
            [
                shards[plan.rank][slices(t.box, exchange.owned[plan.rank])].ravel()
                for t in message.transfers
            ]
        )
        for plan in exchange.plans
        for message in plan.sends
    }
    for plan in exchange.plans:
        slots = [np.zeros(box.shape, int) for box in exchange.needed[plan.rank]]
        boxes_needed = exchange.needed[plan.rank]
        for t in plan.copies:
            piece = shards[plan.rank][slices(t.box, exchange.owned[plan.rank])]
            slots[t.slot][slices(t.box, boxes_needed[t.slot])] += piece
        for message in plan.recvs:
            wire, offset = wires.pop((message.peer, plan.rank)), 0
            assert wire.size == message.elements
            for t in message.transfers:
                piece = wire[offset : offset + t.box.volume].reshape(t.box.shape)
                slots[t.slot][slices(t.box, boxes_needed[t.slot])] += piece
                offset += t.box.volume
        for slot, box in zip(slots, boxes_needed, strict=True):
            for index in indices(box):
                local = tuple(i - lo for i, lo in zip(index, box.lo, strict=True))
                assert slot[local] == (0 if exchange.is_padding(index) else whole[index])
    assert not wires


def incoming(plan: Plan):
    return itertools.chain(plan.copies, *(message.transfers for message in plan.recvs))


def slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """`box` in the local indices of an array that covers `origin`."""
    return box.shift([-lo for lo in origin.lo]).slices


# A full layer ----------------------------------------------------------------------------------


@given(footprints(), partitions())
def test_a_strided_layer_on_shards_equals_the_whole(foot, split):
    """Each rank correlates along one dim, with the values that its plan exchanges."""
    outputs = foot.output_partition(split)
    owned = [shard([split], [rank]) for rank in range(split.parts)]
    needed = [[footprint_box([foot], [split], [rank])] for rank in range(split.parts)]
    signal = np.arange(1, split.extent + 1) ** 2
    weights = np.arange(1, foot.kernel + 1)

    def value(read, output):
        first = output * foot.stride - foot.padding_lo
        return sum(w * read(first + k * foot.dilation) for k, w in enumerate(weights))

    for rank in range(split.parts):
        plan = plan_exchange(owned, needed, rank)
        have = {t_index for t in incoming(plan) for (t_index,) in indices(t.box)}
        for output in range(*outputs.interval(rank)):
            local = value(lambda i: signal[i] if i in have else 0, output)  # noqa: B023
            whole = value(lambda i: signal[i] if 0 <= i < split.extent else 0, output)
            assert local == whole
