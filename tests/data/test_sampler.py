"""Tests of the sampler: every sample once, in the same order on every mesh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist.data import MeshSampler
from pydist.data.batch_sizes import BatchSizes
from pydist.errors import UsageError
from pydist.partition import divide


def samplers(num: int, groups: int, batch: int, **options: object) -> list[MeshSampler]:
    return [MeshSampler(num, groups, g, batch, **options) for g in range(groups)]


@given(
    num=st.integers(1, 60),
    groups=st.integers(1, 6),
    extra=st.integers(0, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    shares=st.none() | st.lists(st.sampled_from([0.1, 1.0, 3.0]), min_size=6, max_size=6),
)
def test_training_batches(num, groups, extra, shuffle, epoch, shares) -> None:
    """Groups hold contiguous blocks of the global batch; padding is marked and not counted."""
    batch = groups + extra
    shares = shares and shares[:groups]
    every = samplers(num, groups, batch, shuffle=shuffle, seed=7, shares=shares)
    order = every[0].order(epoch).tolist()
    assert sorted(order) == list(range(num))
    for step in range(len(every[0])):
        parts = [s.batch(epoch, step) for s in every]
        whole = order[step * batch : (step + 1) * batch]
        assert {p.global_size for p in parts} == {len(whole)}
        counted = [i for p in parts if p.count for i in p.indices]
        assert counted == whole
        positions = [p.first_sample + n for p in parts for n in range(len(p.indices))]
        assert positions == list(range(len(positions)))
        for part in parts:
            assert part.indices, "all groups step together"
            assert part.count in (0, len(part.indices))
            if part.count:
                start = part.first_sample
                assert list(part.indices) == whole[start : start + part.count]
        sizes = [p.count for p in parts]
        if shares is None:
            assert max(sizes) - min(sizes) <= 1
        elif len(whole) >= groups:
            assert sizes == list(divide(len(whole), shares).sizes)
        # As in the trainer, the mean of scaled mean losses over groups is the global mean.
        scaled = [p.count * groups / p.global_size for p in parts]
        means = [sum(p.indices) / len(p.indices) for p in parts]
        mean = sum(s * m for s, m in zip(scaled, means, strict=True)) / groups
        assert mean == pytest.approx(sum(whole) / len(whole))


@given(num=st.integers(1, 60), groups=st.integers(1, 6), batch=st.integers(1, 12))
def test_evaluation_sees_every_sample_exactly_once(num: int, groups: int, batch: int) -> None:
    every = samplers(num, groups, batch, shuffle=False, pad=False)
    seen = [i for s in every for part in s for i in part.indices]
    assert sorted(seen) == list(range(num))


@given(
    num=st.integers(8, 60),
    batch=st.integers(8, 20),
    drop_last=st.booleans(),
    before=st.integers(1, 8),
    after=st.integers(1, 8),
    data=st.data(),
)
def test_resume_on_another_mesh_goes_on_with_the_same_global_batches(
    num: int, batch: int, drop_last: bool, before: int, after: int, data: st.DataObject
) -> None:
    if drop_last:
        batch = min(batch, num)
    options = {"drop_last": drop_last, "seed": 5}
    first = samplers(num, before, batch, **options)
    steps = data.draw(st.integers(0, 2 * len(first[0])))
    for sampler in first:
        taken = 0
        while taken < steps:
            for _ in sampler:
                taken += 1
                if taken == steps:
                    break
    second = samplers(num, after, batch, **options)
    for sampler in second:
        sampler.load_state_dict(first[0].state_dict())
    epoch, step = divmod(steps, len(first[0]))
    assert (second[0].epoch, second[0].step) == (epoch, step)
    rest = [list(s) for s in second]
    assert len(rest[0]) == len(first[0]) - step
    order = first[0].order(epoch).tolist()
    if drop_last:
        order = order[: num // batch * batch]
    found = [i for parts in zip(*rest, strict=True) for p in parts if p.count for i in p.indices]
    assert found == order[step * batch :]


def test_order_depends_on_seed_and_epoch() -> None:
    sampler, other = MeshSampler(50, 1, 0, 5, seed=1), MeshSampler(50, 1, 0, 5, seed=2)
    assert sampler.order(0).tolist() == sampler.order(0).tolist()
    assert sampler.order(0).tolist() != sampler.order(1).tolist()
    assert sampler.order(0).tolist() != other.order(0).tolist()


def test_order_is_the_same_for_good() -> None:
    """Checkpoints rely on the order: a change here breaks the resume of older runs."""
    assert MeshSampler(10, 1, 0, 1, seed=0).order(0).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]


def test_orders_are_uniform() -> None:
    first = [int(MeshSampler(4, 1, 0, 1, seed=s).order(e)[0]) for s in range(40) for e in range(25)]
    counts = [first.count(i) for i in range(4)]
    assert all(abs(c - 250) < 5 * (1000 * 0.25 * 0.75) ** 0.5 for c in counts)


def test_iterating_goes_from_epoch_to_epoch() -> None:
    sampler = MeshSampler(5, 1, 0, 2)
    assert [(b.epoch, b.step) for _ in range(2) for b in sampler] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert (sampler.epoch, sampler.step) == (2, 0)
    sampler.seek(4, 2)
    assert [(b.epoch, b.step) for b in sampler] == [(4, 2)]


def test_an_epoch_that_a_kept_iterator_has_ended_is_not_repeated() -> None:
    sampler = MeshSampler(2, 1, 0, 2)
    kept = iter(sampler)
    assert next(kept).is_last
    assert [batch.epoch for batch in sampler] == [1]


def test_state_after_the_last_batch_is_the_next_epoch() -> None:
    sampler = MeshSampler(4, 1, 0, 2)
    for batch in sampler:
        if batch.step == 1:
            break
    state = sampler.state_dict()
    assert (state["epoch"], state["step"]) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 11}, "num_samples=11, this one 10"),
        ({"seed": 1}, "seed=1, this one 0"),
        ({"batch_size": 3}, "batch_size"),
        ({"shuffle": False}, "shuffle"),
        ({"drop_last": True}, "drop_last"),
        ({"version": 9}, "version 9"),
        ({"epoch": -1}, "epoch -1"),
        ({"step": 99}, "an epoch has 5 batches"),
    ],
)
def test_state_of_another_order_is_refused(change: dict[str, object], message: str) -> None:
    sampler = MeshSampler(10, 1, 0, 2)
    with pytest.raises(UsageError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, 0, 3), "batch_size=3 .* 4 sample groups; choose at least 4"),
        ((10, 2, 2, 4), "data_index=2"),
        ((0, 1, 0, 1), "num_samples=0"),
    ],
)
def test_impossible_samplers_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MeshSampler(*arguments)


def test_one_share_per_group_is_needed() -> None:
    with pytest.raises(UsageError, match=r"shares=\[1\] with 2 sample groups"):
        MeshSampler(10, 2, 0, 4, shares=[1])


def test_nothing_left_after_dropping_is_refused() -> None:
    with pytest.raises(UsageError, match="3 samples fill no batch of 4"):
        MeshSampler(3, 1, 0, 4, drop_last=True)
    with pytest.raises(UsageError, match="step 2: an epoch has 2 batches"):
        MeshSampler(9, 1, 0, 4, drop_last=True).batch(0, 2)


CHANGES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9)), max_size=4).map(
    lambda found: sorted(dict(found).items())
)


@given(num=st.integers(1, 12), batch=st.integers(1, 9), changes=CHANGES, epochs=st.integers(1, 12))
def test_epochs_are_counted_as_one_by_one(num, batch, changes, epochs) -> None:
    sampler = MeshSampler(num, 1, 0, BatchSizes(batch, changes))
    each = [sampler.steps(epoch) for epoch in range(epochs)]
    assert sampler.steps_until(epochs) == sum(each)
    sizes = [sampler.batch(e, step).step_size for e in range(epochs) for step in range(each[e])]
    assert sampler.shortest(epochs) == min(sizes)
    first = epochs // 2
    found = []
    for begin, count in sampler.equal_epochs(first, epochs):
        found += [(epoch, each[begin]) for epoch in range(begin, begin + count)]
    assert found == list(enumerate(each))[first:]


class Counted(BatchSizes):
    """Sizes that are looked up a few times, however many epochs a run has."""

    left = 200

    def at(self, position: int) -> int:
        self.left -= 1
        assert self.left, "looked up for each epoch"
        return super().at(position)


def test_billions_of_epochs_are_counted_at_once() -> None:
    most, late = 2**31 - 1, 10 * 2**30
    sampler = MeshSampler(10, 1, 0, Counted(4, [(late, 5)]))
    assert sampler.steps_until(most) == 3 * 2**30 + 2 * (most - 2**30)
    assert sampler.shortest(most) == 2
