"""Tests that a demo refuses impossible or unsafe folders before it removes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from pydist.cli.main import main
from pydist.data.lock import FolderLock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the folder that an earlier demo left."""
    folder = tmp_path / "demo"
    (folder / "ckpt").mkdir(parents=True)
    (folder / "one-rank").mkdir()
    for name in ("demo.toml", "log.jsonl", "result.png"):
        (folder / name).write_text(name)
    return folder


def files(folder: Path) -> dict[Path, bytes]:
    found = sorted(folder.rglob("*"))
    return {path: b"" if path.is_dir() else path.read_bytes() for path in found}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo --universes 0", "count=0: at least 1 universe"),
        ("demo --mpi foo", "mpi 'foo' is none of auto, openmpi, mpich, gloo"),
        ("demo unet --volumes 0", "count=0: at least 1 volume"),
        ("demo unet --volumes 2", "--volumes 2: at least 3 are needed"),
        ("demo unet --mpi foo", "mpi 'foo' is none of auto, openmpi, mpich, gloo"),
        ("demo unet --epochs 0", "train.epochs = 0"),
    ],
)
def test_a_wrong_option_removes_nothing(folder, capsys, arguments, message):
    before = files(folder)
    assert main([*arguments.split(), "--folder", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert files(folder) == before


@pytest.mark.parametrize("demo", ["demo", "demo unet"])
@pytest.mark.parametrize("part", [".", "one-rank"])
def test_a_folder_in_use_stays_as_it_is(folder, capsys, demo, part):
    with FolderLock(folder / part):
        before = files(folder)
        assert main([*demo.split(), "--folder", str(folder)]) == 2
        assert files(folder) == before
    said = capsys.readouterr().err
    assert "is in use: process " in said
    assert "writes there" in said


@pytest.mark.parametrize("name", ["ckpt", "one-rank", "log.jsonl", "result.png", "data"])
@pytest.mark.parametrize("demo", ["demo", "demo unet"])
def test_a_folder_that_no_demo_has_made_stays_as_it_is(tmp_path, capsys, demo, name):
    run = tmp_path / "run"
    (run / name).mkdir(parents=True)
    before = files(run)
    assert main([*demo.split(), "--folder", str(run)]) == 2
    assert files(run) == before
    assert f"{run} has {name}, which no demo has made: choose another folder with --folder" in (
        capsys.readouterr().err
    )
