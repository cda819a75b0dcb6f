"""Tests of a store whose disk fails: damage, a full disk, a folder that is gone."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pydist._loader import native
from pydist.comm import Transport, run_local
from support.data.damage import flip
from support.data.spilled import Run, batches_of, compare, run_program
from support.data.stored import seen

RUN = Run(12, 4, reuse=True)


def a_block(folder: Path) -> None:
    flip(folder / native.partition_name(0), 300)


def the_header(folder: Path) -> None:
    flip(folder / native.partition_name(0), 20)


def the_index(folder: Path) -> None:
    flip(folder / native.PACK_INDEX, 200)


def the_end(folder: Path) -> None:
    path = folder / native.partition_name(0)
    os.truncate(path, path.stat().st_size - 1)


def the_partition(folder: Path) -> None:
    (folder / native.partition_name(0)).unlink()


def no_index(folder: Path) -> None:
    (folder / native.PACK_INDEX).unlink()


def scribble_on_open_spills() -> None:
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            if ".pydist-store" in str(path.readlink()):
                with path.open("r+b") as file:
                    file.seek(300)
                    file.write(b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("damage", "says", "rate"),
    [
        (a_block, "does not match its checksum", 11 / 12), (the_header, "part-00000", 0.5),
        (the_index, "index.pdx", 0.5), (the_end, "damaged", 0.5),
        (the_partition, "No such file", 0.5), (no_index, "", 0.5),
    ],
)  # fmt: skip
def test_damage_is_found_and_files_are_read(
    damage: Callable[[Path], None],
    says: str,
    rate: float,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One of two ranks' spills is damaged. The run after the next one finds all again."""
    compare(RUN, tmp_path)
    damage(sorted(tmp_path.iterdir())[0])
    capfd.readouterr()
    for epochs in compare(RUN, tmp_path):
        assert epochs[0][0].hit_rate == pytest.approx(rate)
        assert sum(figures.lost_blocks for figures, _ in epochs) == (damage is a_block)
    said = capfd.readouterr().err
    assert says in said
    assert said.count("\n") == bool(says)
    for epochs in compare(RUN, tmp_path):
        assert epochs[0][0].hit_rate >= 11 / 12


def test_damage_in_a_running_spill_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file has no name, but its process has it open."""
    run = Run(12, 4, (1, 1, 1))

    def job(transport: Transport) -> None:
        with run.loader(run.source(), transport) as loader:
            expected = [seen(batch) for batch in batches_of(loader, training=True)]
        with run.loader(run.source(), transport, tmp_path) as loader:
            found = []
            for number, batch in enumerate(batches_of(loader, training=True)):
                if number == 5:
                    scribble_on_open_spills()
                found.append(seen(batch))
            assert found == expected
            assert loader.store is not None
            figures = loader.store.counted()
            assert figures.lost_blocks == 1
            assert figures.blocks - figures.file_blocks == 2 * 12 - 1

    run_local(job, 1, timeout=60)
    said = capfd.readouterr().err
    assert "does not match its checksum; the sample is read from the data set instead" in said
    assert said.count("\n") == 1


def test_a_folder_that_is_gone_costs_the_next_run_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(12, 4, (1, 1, 1), reuse=True)
    folder = tmp_path / "spill"

    def job(transport: Transport) -> None:
        with run.loader(run.source(), transport) as loader:
            expected = [seen(batch) for batch in batches_of(loader, training=True)]
        source = run.source()
        with run.loader(source, transport, folder) as loader:
            found = []
            for number, batch in enumerate(batches_of(loader, training=True)):
                if number == 1:
                    shutil.rmtree(folder)
                found.append(seen(batch))
            assert found == expected
        assert set(source.reads.values()) == {1}, "the open file is read"

    run_local(job, 1, timeout=60)
    assert "the next run will not find these samples" in capfd.readouterr().err
    for epochs in compare(run, folder):
        assert epochs[0][0].hit_rate == 0


def test_a_full_disk_leaves_files(tmp_path: Path) -> None:
    """A file may have 1,500 bytes: few of the 6 samples that a rank has no memory for.

    Which ones are written first, and so how many fit, differs between runs. A further run has
    another file for the others.
    """
    done = run_program(tmp_path, 1500)
    unnamed, lasting, next_run = json.loads(done.stdout)
    assert 0.5 < unnamed < 1
    assert 0.5 < lasting < next_run
    assert done.stderr.count("File too large; no more samples are written there") >= 3


@pytest.mark.parametrize("fails", ["lock", "partition", "index"])
def test_a_full_disk_leaves_no_folders(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fails == "lock":
        monkeypatch.setattr("pydist.data.lock.os.pwrite", full)
    elif fails == "partition":
        monkeypatch.setattr("pydist.data.store.lasting.LastingSpill._open", full)
    else:
        monkeypatch.setattr("pydist.data.store.lasting.publish", full)
    compare(RUN, tmp_path)
    assert "No space left on device" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_job_leaves_its_spill_to_the_next_one(tmp_path: Path) -> None:
    run = Run(12, 4, reuse=True)

    def job(transport: Transport) -> None:
        with run.loader(run.source(), transport, tmp_path) as loader:
            for number, _ in enumerate(batches_of(loader, training=True)):
                if number == 6:
                    raise ArithmeticError("the fault")
                transport.barrier()

    with pytest.raises(ArithmeticError):
        run_local(job, 2, timeout=60)
    for epochs in compare(run, tmp_path):
        assert epochs[0][0].hit_rate == 1


def test_bad_samples_are_those_of_files(tmp_path: Path) -> None:
    """A sample that can't be read ends the run with the error of files, with preloading too."""
    messages = set()
    for preload in (None, False, True):

        def job(transport: Transport, preload: bool | None = preload) -> None:
            run = Run(12, 4, preload=bool(preload), bad=(7,))
            folder = None if preload is None else tmp_path
            with run.loader(run.source(), transport, folder) as loader:
                for _ in batches_of(loader, training=True):
                    transport.barrier()

        with pytest.raises(Exception, match="sample 7 is bad") as caught:
            run_local(job, 2, timeout=60)
        messages.add(f"{type(caught.value)} {caught.value}")
    assert len(messages) == 1
