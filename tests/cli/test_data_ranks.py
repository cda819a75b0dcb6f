"""Tests of `pydist data` on the ranks of an MPI job, which share the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pydist.cli.main import main
from pydist.launch.backends import available
from support.jobs.children import child_environment

Ranks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["openmpi", "mpich"])
def on_ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Ranks:
    """Returns a function that runs `pydist data` on three ranks."""
    backend = {each.name: each for each in available()}.get(request.param)
    if backend is None:
        pytest.skip(f"{request.param} is not installed")

    def run(
        *arguments: str | Path, program: Sequence[str] = (sys.executable, "-m", "pydist", "data")
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            backend.command(3, [*program, *map(str, arguments)]),
            env={**child_environment(), **backend.variables(3, tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Returns a folder with seven HDF5 files, without a manifest."""
    folder = tmp_path / "files"
    folder.mkdir()
    draws = np.random.default_rng(0)
    for number in range(7):
        with h5py.File(folder / f"{number}.hdf5", "w") as file:
            file["full"] = draws.integers(0, 99, (4, 6, 4, 2), np.int16)
            file["unitPar"] = draws.random(4, np.float32)
    return folder


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "dataset.json").read_bytes())


def test_index_info_verify_and_convert(
    on_ranks: Ranks, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "index", str(foreign), "--workers", "1"]) == 0
    alone = manifest_of(foreign)
    (foreign / "dataset.json").unlink()

    done = on_ranks("index", foreign)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, repr(done.stdout)
    (line,) = done.stdout.splitlines()
    assert line.startswith("data       7 hdf5 files → 7 samples of 4 × 6 × 4")
    assert done.stderr == ""
    assert manifest_of(foreign) == alone

    capsys.readouterr()
    assert main(["data", "info", str(foreign), "--deep", "--json", "--workers", "1"]) == 0
    expected = json.loads(capsys.readouterr().out)
    (foreign / ".info.json").unlink()
    done = on_ranks("info", foreign, "--deep", "--json")
    assert json.loads(done.stdout) == expected

    done = on_ranks("convert", foreign, tmp_path / "copy", "--format", "numpy")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    done = on_ranks("verify", tmp_path / "copy", "--deep")
    assert (done.returncode, done.stdout.split()[0]) == (0, "verified")


def test_what_is_wrong_is_said_once(on_ranks: Ranks, foreign: Path) -> None:
    damaged = foreign / "3.hdf5"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:500])
    done = on_ranks("index", foreign)
    assert done.returncode == 65
    assert done.stderr.count("3.hdf5") == 1, done.stderr
    assert not (foreign / "dataset.json").exists()
    assert not list(foreign.glob("*lock*"))
    damaged.write_bytes(content)
    done = on_ranks("index", foreign)
    assert done.returncode == 0, done.stderr


def test_output_that_no_terminal_gets_has_no_colors(on_ranks: Ranks) -> None:
    """Open MPI gives each rank a terminal of its own."""
    assert "\x1b" not in on_ranks("index", "--help").stdout
    wrong = on_ranks("index", "folder", "--bogus")
    assert "\x1b" not in wrong.stderr
    assert "error: Unrecognized options: --bogus" in wrong.stderr


def test_ranks_without_mpi_are_refused(foreign: Path) -> None:
    program = [sys.executable, "-m", "pydist", "data", "index", str(foreign)]
    ranks = {"PYDIST_RANK": "0", "PYDIST_SIZE": "2"}
    done = subprocess.run(
        program, env={**os.environ, **ranks}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pydist has started 2 ranks without MPI" in done.stderr


ONE_PROCESS = {
    "universes": ["out"],
    "ct": ["out"],
    "nifti": ["in", "out"],
    "dicom": ["in", "out", "--labels", "in"],
    "pack": ["in", "-o", "out"],
}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_commands_of_one_process_are_refused_on_several_ranks(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    program = [sys.executable, "-m", "pydist", "data", name, *ONE_PROCESS[name]]
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    env = {**child_environment(), **ranks}
    done = subprocess.run(
        program, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "openmpi has started 2 ranks, but this command" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["index", "info", "verify"])
def test_ranks_with_different_folders_are_refused(
    name: str, foreign: Path, tmp_path: Path, on_ranks: Ranks
) -> None:
    """Else the folders of all ranks but the first would silently be left out."""
    script = tmp_path / "each.py"
    script.write_text(
        "import os, sys\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
        "from pydist.cli.main import main\n"
        "sys.exit(main(['data', sys.argv[1], f'{sys.argv[2]}/{rank}']))\n"
    )
    done = on_ranks(name, foreign, program=[sys.executable, str(script)])
    assert done.returncode == 2, done.stderr
    differing = f"but folder is {foreign}/0 on rank 0, {foreign}/1 on rank 1: start other commands"
    assert done.stderr.count(differing) == 1


def test_ranks_on_machines_with_other_numbers_of_cores_are_not_refused(
    foreign: Path, tmp_path: Path, on_ranks: Ranks
) -> None:
    """The default of `--workers`, which ranks do not use, differs there."""
    script = tmp_path / "each.py"
    script.write_text(
        "import os, sys\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
        "os.sched_setaffinity(0, {0} if rank == '1' else {0, 1})\n"
        "from pydist.launch.backends import cores\n"
        "assert cores() == (1 if rank == '1' else 2)\n"
        "from pydist.cli.main import main\n"
        "sys.exit(main(['data', *sys.argv[1:]]))\n"
    )
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    done = on_ranks("index", foreign, program=[sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    assert len(manifest_of(foreign)["splits"]) > 0


def test_a_number_of_workers_below_one_is_refused(foreign: Path, on_ranks: Ranks) -> None:
    done = on_ranks("index", foreign, "--workers", "0")
    assert done.returncode == 2, done.stderr
    assert "--workers 0: at least 1" in done.stderr
    assert not (foreign / "dataset.json").exists()
