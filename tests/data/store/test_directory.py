"""Tests of the directory of a store: all ranks agree, limits hold, an undo takes all back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pydist.data.store.directory import Budget, Directory

SAMPLES = 12
budgets = st.builds(Budget, st.integers(1, 30), st.integers(0, 30))


def state(directory: Directory) -> tuple[list[int], list[list[int]]]:
    return directory.owners.tolist(), [list(held) for held in directory.held]


@given(st.data())
def test_all_ranks_agree_within_their_limits(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([[0], [0, 1], [0, 0, 1, 1], [0, 1, 2]]), "groups")
    limits = [data.draw(budgets) for _ in groups]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=SAMPLES, max_size=SAMPLES), "sizes")
    ranks = range(len(groups))
    directories = [Directory(SAMPLES, rank, groups, limits, sizes.__getitem__) for rank in ranks]
    found = [data.draw(st.sets(st.integers(0, SAMPLES - 1), max_size=2)) for _ in ranks]
    found = [
        sorted(samples) if sum(sizes[each] for each in samples) <= limits[rank].disk else []
        for rank, samples in enumerate(found)
    ]
    for directory in directories:
        directory.adopt(found)
    samples = st.lists(st.integers(0, SAMPLES - 1), max_size=3)
    for _ in range(4):
        batches = {group: data.draw(samples) for group in dict.fromkeys(groups)}
        before = state(directories[0])
        moves = [directory.place(batches) for directory in directories]
        if data.draw(st.booleans(), "undo"):
            for directory, each in zip(directories, moves, strict=True):
                directory.undo(each)
                assert state(directory) == before
            continue
        assert all(state(directory) == state(directories[0]) for directory in directories)
        sent = sorted((rank, *each) for rank in ranks for each in moves[rank].sends)
        received = sorted((src, rank, each) for rank in ranks for src, each in moves[rank].recvs)
        assert sent == received
        for rank, (memory, disk) in enumerate(directories[0].held):
            assert memory <= limits[rank].memory
            assert disk <= limits[rank].disk
            owned = directories[0].owned(rank)
            assert memory + disk == sum(sizes[each] for each in owned)
            needed = batches[groups[rank]]
            ways = (moves[rank].own, [s for _, s in moves[rank].recvs], moves[rank].reads)
            assert sorted(needed) == sorted(sample for way in ways for sample in way)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3))
def test_a_directory_is_final_when_no_sample_finds_a_place(limits: list[tuple[int, int]]) -> None:
    """Samples of 10 bytes."""
    ranks = range(len(limits))
    directory = Directory(SAMPLES, 0, list(ranks), [Budget(*each) for each in limits], lambda _: 10)
    room = [memory // 10 + disk // 10 for memory, disk in limits]
    for sample in range(SAMPLES):
        owned = np.count_nonzero(directory.owners == 0)
        assert directory.is_final() == (owned == room[0])
        directory.place({rank: [sample] if rank == 0 else [] for rank in ranks})
    assert directory.is_final()
