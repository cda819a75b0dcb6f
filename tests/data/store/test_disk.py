"""Tests of a store that spills to disk: the batches of files, whatever fits where."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist.comm import Transport, run_local
from support.data.spilled import MESHES, SIZE, Run, batches_of, compare
from support.data.stored import seen


@st.composite
def runs(draw: st.DrawFn) -> Run:
    mesh = draw(st.sampled_from(MESHES))
    mixed = draw(st.booleans())
    batch = mesh[0] if mixed else draw(st.integers(mesh[0], mesh[0] + 4))
    reuse = draw(st.booleans())
    return Run(
        samples=draw(st.integers(batch, 12)),
        batch=batch,
        mesh=mesh,
        labeled=draw(st.booleans()),
        mixed=mixed,
        training=draw(st.booleans()),
        memory=draw(st.sampled_from([1, 400, 1000, 3000] + [None] * reuse)),
        disk=draw(st.sampled_from([1, 400, 1000, 10**6])),
        codec=draw(st.sampled_from(["raw", "zstd", "lz4"])),
        reuse=reuse,
        preload=draw(st.booleans()),
        prefetch=draw(st.integers(1, 3)),
    )


@given(runs(), st.data())
@settings(deadline=None, max_examples=40)
def test_batches_are_those_of_files(run: Run, data: st.DataObject) -> None:
    """Also after the epoch is left early, after a change of the batch, and in the next run."""
    left_at = data.draw(st.integers(0, 5), "left at")
    changes = run.training and not run.mixed and data.draw(st.booleans(), "changes the batch")

    def visit(transport: Transport, folder: Path | None) -> list[Any]:
        found = []
        with run.loader(run.source(), transport, folder) as loader:
            for number, batch in enumerate(batches_of(loader, run.training, 2)):
                found.append(seen(batch))
                if number == left_at:
                    if changes:
                        loader.change_batch(run.batch + 1)
                    break
            for batch in batches_of(loader, run.training, 3):
                found.append(seen(batch))
            if loader.store is not None:
                assert loader.store.held_bytes <= (run.memory or 10**9) + 3 * 1000
                disk = loader.store.holdings.disk
                assert disk is not None
                assert disk.spill.nbytes <= run.disk
                assert disk.lost == 0
        return found

    def job(transport: Transport, folder: Path) -> None:
        expected = visit(transport, None)
        assert visit(transport, folder) == expected
        assert visit(transport, folder) == expected

    with TemporaryDirectory() as name:
        run_local(job, run.ranks, Path(name), timeout=120)


@pytest.mark.parametrize("codec", ["raw", "zstd", "lz4"])
@pytest.mark.parametrize("mesh", MESHES)
def test_no_file_is_read_after_the_first_epoch(
    mesh: tuple[int, int, int], codec: str, tmp_path: Path
) -> None:
    run = Run(12, 4, mesh, codec=codec)
    for epochs in compare(run, tmp_path):
        first, *others = epochs
        assert first[0].hit_rate == 0
        for figures, bytes_read in others:
            assert bytes_read == first[1]
            assert figures.hit_rate == 1
            assert 0 < figures.disk_rate < 1
            assert figures.lost_blocks == 0
            if codec == "raw":
                assert figures.compression == 1
            else:
                assert figures.compression >= 1
        assert others[-1][0].disk_bytes > 0
    assert list(tmp_path.iterdir()) == [], "a run without reuse leaves nothing"


def test_blocks_are_divided_by_the_limits(tmp_path: Path) -> None:
    """12 samples on 2 ranks: each has room for one in memory and two on disk."""
    run = Run(12, 4, memory=SIZE + 63, disk=2 * SIZE + 63)
    for epochs in compare(run, tmp_path):
        for figures, _ in epochs[1:]:
            assert figures.hit_rate == pytest.approx(6 / 12)
            assert figures.disk_rate <= 4 / 12 + 1e-9, "those being written are in memory"
            assert (figures.held_bytes, figures.most_held_bytes) == (2 * SIZE, SIZE)
        assert epochs[-1][0].spilled_bytes == 4 * SIZE


def test_preload_reads_all_before_the_first_batch(tmp_path: Path) -> None:
    run = Run(12, 4, preload=True)

    def job(transport: Transport) -> None:
        source, steps = run.source(), []
        with run.loader(source, transport, tmp_path) as loader:
            loader.preload(lambda done, batches: steps.append((done, batches)))
            assert steps == [(1, 3), (2, 3), (3, 3)]
            reads = Counter(source.reads)
            assert set(reads.values()) == {1}
            assert len(reads) == 6
            for _ in batches_of(loader, training=True):
                pass
            assert source.reads == reads
            assert loader.store is not None
            assert loader.store.counted().over(transport).hit_rate == 1

    run_local(job, 2, timeout=60)


def test_a_folder_that_can_not_be_made_leaves_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for reuse in (False, True):
        run = Run(6, 2, (1, 1, 1), reuse=reuse)
        for epochs in compare(run, tmp_path / "file"):
            held = 6 * epochs[2][0].hit_rate
            # One sample in memory, and at most two that the writing thread has not looked at yet.
            assert held == pytest.approx(round(held))
            assert round(held) in (1, 2, 3)
            assert 0 < sum(figures.lost_blocks for figures, _ in epochs) <= 5
    assert "a folder is needed" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
