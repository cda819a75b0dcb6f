"""Tests of samples that stay on disk for the next run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from pydist import owner
from pydist.comm import Transport, run_local
from pydist.data import IndexOptions, Loader, ShardDataset, index_dataset
from pydist.mesh import Mesh
from support.data.spilled import SIZE, Run, batches_of, compare
from support.data.stored import seen


@pytest.mark.parametrize("memory", [None, 1, 2 * SIZE])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("training", [True, False])
def test_the_next_run_reads_no_file(
    training: bool, codec: str, memory: int | None, tmp_path: Path
) -> None:
    run = Run(12, 4, (2, 2, 1), memory=memory, codec=codec, reuse=True, training=training)
    for first, *_ in compare(run, tmp_path):
        assert first[1] > 0
    for epochs in compare(run, tmp_path):
        for figures, bytes_read in epochs:
            assert bytes_read == 0
            assert figures.hit_rate == 1
            assert figures.lost_blocks == 0
        if memory is None:
            assert epochs[-1][0].disk_rate == 0, "what was read once is in memory"
    assert len(list(tmp_path.glob("pydist-store-*"))) == 4


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("samples", [12, 9])  # of 9 the last batch has none for the second group
def test_all_groups_of_an_evaluation_save_their_blocks_after_each_epoch(
    samples: int, memory: int | None, tmp_path: Path
) -> None:
    run = Run(samples, 4, memory=memory, reuse=True, training=False)

    def job(transport: Transport) -> None:
        with (
            contextlib.suppress(KeyboardInterrupt),
            run.loader(run.source(), transport, tmp_path) as loader,
        ):
            for _ in batches_of(loader, training=False):
                pass
            assert loader.store is not None
            assert loader.store.holdings.disk is not None
            loader.store.holdings.disk._wait_for_save()
            raise KeyboardInterrupt  # it is killed, and nothing is saved at its end

    run_local(job, 2, timeout=60)
    for epochs in compare(run, tmp_path):
        assert epochs[0][1] == 0


def test_what_was_not_saved_is_read_by_the_next_run(tmp_path: Path) -> None:
    """The disk has room for 2 of each rank's 6 samples, so the others are read again."""
    run = Run(12, 4, memory=None, disk=2 * SIZE, reuse=True)
    compare(run, tmp_path)
    for epochs in compare(run, tmp_path):
        assert [figures.hit_rate for figures, _ in epochs] == pytest.approx([4 / 12, 1, 1])


@pytest.mark.parametrize(
    "other", [Run(11), Run(labeled=True), Run(mesh=(1, 2, 1)), Run(mesh=(3, 1, 1))]
)
def test_a_run_of_another_kind_keeps_its_own_blocks(other: Run, tmp_path: Path) -> None:
    run = Run(12, 4, reuse=True)
    compare(run, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.pack")}
    for first, *_ in compare(Run(**{**vars(other), "reuse": True}), tmp_path):
        assert first[0].hit_rate == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("change", ["another data set", "a changed file"])
def test_without_checksums_files_tell_data_sets_apart(change: str, tmp_path: Path) -> None:
    """Manifests of equal names and sizes without checksums and means are equal."""
    options = IndexOptions(validation=0, statistics=False, checksums=False)
    first, scratch = tmp_path / "first", tmp_path / "scratch"

    def write(path: Path, value: int) -> None:
        path.parent.mkdir(exist_ok=True)
        with h5py.File(path, "w") as file:
            file["full"] = np.full((1, 4, 4, 4), value, "int16")
            file["unitPar"] = np.full(1, value, "float32")

    def trained_on(folder: Path) -> tuple[list[float], int]:
        """Returns the values of the targets, and the bytes read from files."""

        def job(transport: Transport) -> tuple[list[float], int]:
            data = ShardDataset(folder)
            with Loader(
                data, Mesh(transport, 1), 2, store="memory", store_disk="1MB",
                store_folder=scratch, store_reuse=True,
            ) as loader:  # fmt: skip
                seen = [x for batch in loader.batches(0) for x in batch.targets.flatten().tolist()]
            data.close()
            return sorted(seen), data.bytes_read

        return run_local(job, 1, timeout=60)[0]

    for n in range(4):
        write(first / f"{n}.h5", n)
    index_dataset(first, options)
    assert trained_on(first)[1] > 0
    assert trained_on(first) == ([0, 1, 2, 3], 0)
    changed = tmp_path / "second" if change == "another data set" else first
    for n in range(4) if changed != first else [0]:
        write(changed / f"{n}.h5", n + 10)
    assert index_dataset(changed, options).digest == index_dataset(first, options).digest
    assert trained_on(changed)[0] == ([10, 11, 12, 13] if changed != first else [1, 2, 3, 10])


def test_ranks_that_found_the_same_blocks_agree_on_one(tmp_path: Path) -> None:
    """The spills of two runs with other orders: one rank has lost its spill in between."""
    run = Run(12, 4, reuse=True)
    compare(run, tmp_path)
    _, lost = sorted(tmp_path.iterdir())
    for path in lost.iterdir():
        path.unlink()

    def job(transport: Transport) -> None:
        mesh = Mesh(transport, 2, seed=6)  # another order
        with Loader(
            run.source(), mesh, 4, store="memory", store_memory=SIZE, store_disk=10**6,
            store_folder=tmp_path, store_reuse=True,
        ) as loader:  # fmt: skip
            for _ in batches_of(loader, training=True):
                pass

    run_local(job, 2, timeout=60)
    for epochs in compare(run, tmp_path):
        assert [figures.hit_rate for figures, _ in epochs] == [1, 1, 1]


def test_two_runs_at_a_time_have_spills_of_their_own(tmp_path: Path) -> None:
    run = Run(6, 2, (1, 1, 1), reuse=True)

    def job(transport: Transport) -> None:
        with (
            run.loader(run.source(), transport, tmp_path) as one,
            run.loader(run.source(), transport, tmp_path) as other,
        ):
            for first, second in zip(batches_of(one, True), batches_of(other, True), strict=True):
                assert seen(first) == seen(second)

    run_local(job, 1, timeout=60)
    assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["-0", "-1"]
    for epochs in compare(run, tmp_path):
        assert epochs[0][1] == 0


def test_a_lower_limit_removes_what_is_above_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compare(Run(6, 2, (1, 1, 1), reuse=True), tmp_path)
    lower = Run(6, 2, (1, 1, 1), disk=3 * SIZE, reuse=True)
    for epochs in compare(lower, tmp_path):
        assert epochs[0][0].hit_rate == 0
        assert epochs[1][0].hit_rate == pytest.approx(4 / 6)
    assert f"{6 * SIZE:,} bytes of blocks, and {3 * SIZE:,} allowed" in capfd.readouterr().err
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.pack")) <= 4 * SIZE


def test_what_killed_runs_of_any_kind_left_is_removed(tmp_path: Path) -> None:
    compare(Run(6, 2, (1, 1, 1), reuse=True), tmp_path)
    (spill,) = tmp_path.iterdir()
    before = sorted(spill.iterdir())
    child = os.fork()
    if child == 0:
        for path in (tmp_path / ".pydist-store", spill / ".part-00001.pack"):
            owner.temporary(path).touch()
        os._exit(0)
    os.waitpid(child, 0)
    mine = owner.temporary(spill / ".part-00001.pack")  # of a process that runs
    mine.touch()
    other = tmp_path / "notes.txt"
    other.touch()
    compare(Run(7, 2, (1, 1, 1)), tmp_path)
    assert sorted(spill.iterdir()) == sorted([*before, mine])
    assert sorted(tmp_path.iterdir()) == [other, spill]
