"""Tests that a step in several passes is that of one device with the whole batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist.comm import LocalTransport
from pydist.data.batch_sizes import BatchSizes, PassRule
from pydist.gradients.bucket import Bucket
from pydist.gradients.partitioned_bucket import PartitionedBucket
from pydist.mesh import Mesh
from support.equivalence import on_ranks
from support.training.accumulated import Samples, assert_as, on_mesh, plainly


def batches(count: int, epochs: int, size_at) -> list[list[int]]:
    """Returns the samples of each step: the documented order, cut where the batches begin."""
    found, seen = [], 0
    for epoch in range(epochs):
        bits = np.random.Philox(np.random.SeedSequence([3, epoch])).random_raw(count)
        order, place = np.argsort(bits, kind="stable").tolist(), 0
        while place < count:
            size = size_at(seen)
            found.append(order[place : place + size])
            place += len(found[-1])
            seen += len(found[-1])
    return found


@settings(max_examples=25)
@given(
    groups=st.integers(1, 3),
    spatial=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1)]),
    count=st.integers(5, 11),
    data=st.data(),
    labeled=st.booleans(),
    partitioned=st.booleans(),
    by=st.sampled_from(["accumulate", "batch", "both"]),
    pad=st.booleans(),
)
def test_steps_are_those_of_one_device(groups, spatial, count, data, labeled, partitioned, by, pad):
    """Over groups, split samples, short batches, passes, and a batch that changes in an epoch."""
    batch = data.draw(st.integers(groups, 6), "batch")
    accumulate = data.draw(st.integers(1, batch // groups), "accumulate")
    place = data.draw(st.integers(1, 2 * count - 1), "place")
    changed = data.draw(st.integers(max(groups, accumulate), 9), "changed batch")
    largest = -(-batch // accumulate) + 1 if by == "both" else None
    rule = PassRule(batch, accumulate, by, largest)
    source = Samples(count, labeled=labeled)

    def body(mesh):
        sizes = BatchSizes(batch, [(place, changed)])
        divides = partitioned and mesh.size > 1
        return on_mesh(mesh, source, sizes, rule, partitioned=divides, pad=pad)

    steps = batches(count, 2, lambda seen: batch if seen < place else changed)
    if labeled:
        # A step without any counted voxel has no mean in torch; of these labels none is such.
        assert all((source.labels[rows] != 1).any() for rows in steps)
    expected = plainly(source, steps)
    for found in on_ranks(spatial, body, groups):
        assert_as(found, expected)


@pytest.mark.parametrize(
    ("groups", "spatial", "accumulate"),
    [(1, (1, 1, 1), 4), (2, (1, 1, 1), 2), (1, (2, 1, 1), 2), (1, (2, 1, 1), 4)],
)
def test_norms_have_the_statistics_of_each_pass(groups, spatial, accumulate):
    """As on one device that accumulates over the same passes, running statistics included."""
    source, rule = Samples(7), PassRule(4, accumulate)
    steps = batches(7, 2, lambda _: 4)
    expected = plainly(source, steps, lambda n: -(-n * accumulate // 4), norm=True)
    whole = plainly(source, steps, norm=True)
    assert abs(whole.losses[0] - expected.losses[0]) > 1e-6  # or the test shows nothing
    for found in on_ranks(
        spatial, lambda mesh: on_mesh(mesh, source, BatchSizes(4), rule, norm=True), groups
    ):
        assert_as(found, expected, 1e-11)


@pytest.mark.parametrize(("groups", "spatial"), [(1, (1, 1, 1)), (2, (1, 1, 1)), (1, (2, 1, 1))])
def test_dropout_does_not_depend_on_the_passes(groups, spatial):
    """In sharded tensors and in the plain ones of the head, over groups that share unevenly."""
    source = Samples(7)
    alone = Mesh(LocalTransport())
    expected = on_mesh(alone, source, BatchSizes(5), PassRule(5), dropout=0.4)
    other = on_mesh(alone, source, BatchSizes(5), PassRule(5), dropout=0.3)
    assert abs(other.losses[0] - expected.losses[0]) > 1e-6
    for rule in (PassRule(5), PassRule(5, 2)):
        run = partial(on_mesh, source=source, sizes=BatchSizes(5), rule=rule, dropout=0.4)
        for found in on_ranks(spatial, run, groups):
            assert_as(found, expected)


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_step_reduces_its_gradient_once(partitioned, monkeypatch):
    kind = PartitionedBucket if partitioned else Bucket
    sent, start = [], kind.start
    monkeypatch.setattr(kind, "start", lambda *args: (sent.append(1), start(*args))[1])
    numbers = []
    for rule in (PassRule(4), PassRule(4, 4)):
        sent.clear()
        run = partial(on_mesh, source=Samples(8), sizes=BatchSizes(4), rule=rule)
        on_ranks((2, 1, 1), partial(run, partitioned=partitioned))
        numbers.append(len(sent))
    assert numbers[0] == numbers[1] > 0


@given(
    batch=st.integers(1, 40), accumulate=st.integers(1, 40), now=st.integers(1, 200),
    short=st.integers(1, 200), by=st.sampled_from(["accumulate", "batch", "both"]),
    more=st.integers(0, 9),
)  # fmt: skip
def test_the_rule_of_passes(batch, accumulate, now, short, by, more):
    accumulate = min(accumulate, batch, now)
    first = -(-batch // accumulate)
    rule = PassRule(batch, accumulate, by, first + more if by == "both" else None)
    assert rule.passes(batch, batch) == accumulate or by == "both"
    passes, samples = rule.passes(now, now), min(short, now)
    largest = -(-now // passes)
    if by == "batch":
        assert passes == accumulate
    if by == "accumulate":
        assert largest <= first
    if by == "both":
        assert largest <= max(first + more, 1)
        assert passes == accumulate or largest > first or passes >= accumulate
    parts = rule.passes(now, samples)
    assert 1 <= parts <= samples
    assert -(-samples // parts) <= largest
