"""Tests of `launch` under each backend, without torch: environment, exit codes, output."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pydist.errors import UsageError
from pydist.launch import backends, processes
from pydist.launch.backends import available, backend_named
from pydist.launch.supervisor import launch
from support.jobs.children import run_python

BACKENDS = ("openmpi", "mpich", "gloo")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param not in [each.name for each in available()]:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a folder with spaces"
    path.mkdir()
    return path


def run(
    folder: Path, source: str, *argv: str, n: int = 2, mpi: str = "gloo"
) -> subprocess.CompletedProcess[str]:
    """Runs a script as `pydist run` does, in a separate process."""
    script = folder / "script.py"
    script.write_text("import os, sys, time\nfrom pydist.launch.launcher_env import detect\n"
                      "who = detect()\n" + source)  # fmt: skip
    command = "-m", "pydist.launch", str(n), mpi, script, *argv
    return run_python(*command, folder=folder, seconds=60)


def test_an_outer_job_gives_ranks_no_place(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod of Kubeflow's PyTorchJob."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    result = run(folder, "open(f'{who.size} {who.rank}', 'w')\n", mpi=backend)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in folder.glob("2 *")} == {"2 0", "2 1"}


def test_ranks_get_their_place_and_arguments(folder: Path, backend: str) -> None:
    source = (
        "line = f'{who.rank}/{who.size} {__name__} {sys.argv[1:]} {sys.path[0]}'\n"
        "open(f'{sys.argv[1]}/out{who.rank}', 'w').write(line)\n"
    )
    result = run(folder, source, str(folder), "-n", "--x=a b", n=3, mpi=backend)
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        expected = f"{rank}/3 __main__ {[str(folder), '-n', '--x=a b']} {folder}"
        assert (folder / f"out{rank}").read_text() == expected


def test_output_is_passed_on(folder: Path, backend: str) -> None:
    source = "print('to stdout'); print('to stderr', file=sys.stderr)\n"
    result = run(folder, source, mpi=backend)
    assert result.returncode == 0
    assert result.stdout.count("to stdout") == 2
    assert result.stderr.count("to stderr") == 2


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("sys.exit(7)", 7, "rank 1: exit with code 7"),
        ("raise SystemExit('bye')", 1, "rank 1: bye"),
        ("1 / 0", 71, "[rank 1] ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 2)", 130, "rank 1 was interrupted\n"),
        ("os.kill(os.getpid(), 9)", 72, "pydist: rank 1 (process "),
        ("from pydist.errors import DataError; raise DataError('file.h5')", 65, "error: file.h5"),
    ],
)
def test_one_rank_ends_the_others_with_its_code(
    folder: Path, backend: str, end: str, code: int, text: str
) -> None:
    start = time.monotonic()
    result = run(folder, f"if who.rank == 1:\n    {end}\ntime.sleep(60)\n", mpi=backend)
    assert time.monotonic() - start < 30
    assert result.returncode == code
    if backend == "mpich":  # kills the others so soon that either rank's watcher may be first
        text = text.replace("rank 1 (process", "(process").replace("pydist: ", "")
    assert result.stderr.count(text) == 1, result.stderr
    assert "runpy" not in result.stderr
    assert "worker.py" not in result.stderr


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), 50)", "was killed by signal 50"),
        ("import atexit; atexit.register(os._exit, 0)", "ended with code 0, without reporting"),
        ("import atexit; atexit.register(os.kill, os.getpid(), 9)", "was killed by signal 9 (SIG"),
    ],
)
def test_how_a_rank_has_ended_is_said(folder: Path, end: str, how: str) -> None:
    result = run(folder, f"if who.rank == 1:\n    {end}\nelse:\n    time.sleep(60)\n")
    assert result.returncode == 72
    assert f") {how}" in result.stderr


def test_how_a_process_has_ended_is_known_until_its_parent_has_taken_note() -> None:
    for end, code in (("os._exit(7)", 7), ("os.kill(os.getpid(), 15)", -15)):
        with subprocess.Popen([sys.executable, "-c", f"import os; {end}"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert processes.code_of_unreaped(process.pid) == code
        assert processes.code_of_unreaped(process.pid) is None


def test_a_rank_that_ends_before_the_others_join_is_named(folder: Path) -> None:
    """Open MPI then ends the other ranks, which appear to die first."""
    source = (
        "if who.rank == 1:\n    open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid')\n"
        "else:\n    while not os.path.exists('pid'): time.sleep(0.01)\n"
        "    while os.path.exists('/proc/' + open('pid').read()): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 15)\n"
    )
    result = run(folder, source)
    assert result.returncode == 72
    assert "rank 1 ended with code 0 before pydist.init; then rank 0 (process " in result.stderr


def test_an_error_of_all_ranks_is_printed_once(folder: Path, backend: str) -> None:
    source = "from pydist.errors import UsageError\nraise UsageError('all alike')\n"
    result = run(folder, source, n=3, mpi=backend)
    assert result.returncode == 2
    assert result.stderr.count("all alike") == 1


def test_lines_come_whole_and_at_once(folder: Path) -> None:
    source = (
        "print('a line', 'of rank', who.rank)\nopen(f'{who.rank}.done', 'w').close()\n"
        "while not all(os.path.exists(f'{r}.done') for r in range(4)): time.sleep(0.01)\n"
        "os._exit(0)\n"  # nothing is flushed at the end; the first end of this kind ends all ranks
    )
    result = run(folder, source, n=4, mpi="gloo")
    assert sorted(result.stdout.splitlines()) == [f"a line of rank {rank}" for rank in range(4)]


def test_threads_are_shared_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "print(os.environ['OMP_NUM_THREADS'])\n"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, backends.cores() // 2)
    assert run(folder, source).stdout.split() == [str(share)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(folder, source).stdout.split() == ["3"] * 2


def test_a_module_can_be_run(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print('module', sys.argv[1:])")
    command = "-m", "pydist.launch", "2", "gloo", "-m", "package", "x"
    result = run_python(*command, folder=folder, seconds=60)
    assert result.stdout.splitlines() == ["module ['x']"] * 2


def test_unusable_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no script 'absent\.py'"):
        launch(2, ["absent.py"])
    with pytest.raises(UsageError, match="no script to run"):
        launch(2, [])
    with pytest.raises(UsageError, match="0 ranks"):
        launch(0, ["-m", "x"])
    with pytest.raises(UsageError, match="'lam' is none of auto, openmpi, mpich, gloo"):
        backend_named("lam")


def test_a_missing_mpi_says_what_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_wheel", lambda _: None)
    monkeypatch.setattr(backends, "_site_mpi", lambda: None)
    assert backend_named().name == "gloo"
    with pytest.raises(UsageError, match=r"'mpich' is not installed; at hand: gloo"):
        backend_named("mpich")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("mpiexec (Open MPI) 4.1.4", "openmpi"),
        ("mpirun (OpenRTE) 3.1", "openmpi"),
        ("HYDRA build details:\n    Version: 4.2", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10", "mpich"),
        ("something else", None),
    ],
)
def test_the_mpi_of_a_site_is_found_by_its_mpiexec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, name: str | None
) -> None:
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(backends, "find_wheel", lambda _: None)
    found = backends.available()[0]
    assert found.name == (name or "gloo")
    if name is not None:
        assert found.executable == str(program)
        assert found.library is None
