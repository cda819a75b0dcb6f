"""Tests that a failing rank ends all ranks: quickly, with its exit code and one message."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pydist.launch.backends import available
from support.jobs.children import child_environment
from support.jobs.programs import path_of

SCRIPT = path_of("faulty")
LIMIT = 10.0
"""Limit on the seconds from the fault to the end of the last process."""

LAUNCHERS = ("openmpi", "mpich", "torchrun")
BACKENDS = ("openmpi", "mpich", "gloo")


@dataclass
class Outcome:
    code: int
    seconds: float
    stderr: str

    def says_once(self, text: str) -> bool:
        return self.stderr.count(text) == 1


def backend(name: str):
    for each in available():
        if each.name == name:
            return each
    pytest.skip(f"{name} is not installed")


def plain_launcher(name: str, folder: Path, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command line and variables of a user who does not use `pydist run`."""
    if name == "torchrun":
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [sys.executable, *module, *argv], {}
    chosen = backend(name)
    return chosen.command(2, [sys.executable, *argv]), chosen.variables(2, folder)


def pydist_run(name: str, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    backend(name)
    return [sys.executable, "-m", "pydist", "run", "-n", "2", "--mpi", name, *argv], {}


def start(command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=child_environment(**variables),
        cwd=SCRIPT.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> Outcome:
    with process:
        try:
            _, stderr = process.communicate(timeout=60)
        finally:
            for pid in (process.pid, *ranks(folder)):
                with contextlib.suppress(ProcessLookupError):
                    if process.returncode is None:
                        os.kill(pid, signal.SIGKILL)
    assert (folder / "time").exists(), stderr
    fault = float((folder / "time").read_text())
    wait_until_gone(folder, fault + LIMIT)
    return Outcome(process.returncode, time.time() - fault, stderr)


def ranks(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*")]


def wait_until_gone(folder: Path, deadline: float) -> None:
    pids = ranks(folder)
    assert len(pids) == 2
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.time() < deadline, f"processes {alive} are still there"
        time.sleep(0.05)


# With reductions in flight under each launcher. Otherwise the place changes nothing for a launcher.
@pytest.mark.parametrize(
    ("fault", "launcher"),
    [("forward", "openmpi"), ("backward", "mpich"), *(("buckets", name) for name in LAUNCHERS)],
)
def test_an_exception_on_one_rank_ends_all(fault: str, launcher: str, tmp_path: Path) -> None:
    process = start(*plain_launcher(launcher, tmp_path, [str(SCRIPT), str(tmp_path), fault]))
    outcome = finish(process, tmp_path)
    assert outcome.seconds < LIMIT
    # torchrun ends with 1, whatever its ranks say.
    assert outcome.code == (1 if launcher == "torchrun" else 71)
    assert outcome.says_once("[rank 1] ArithmeticError: the fault"), outcome.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_all(launcher: str, tmp_path: Path) -> None:
    process = start(*plain_launcher(launcher, tmp_path, [str(SCRIPT), str(tmp_path), "kill"]))
    outcome = finish(process, tmp_path)
    assert outcome.seconds < LIMIT
    assert outcome.code != 0


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
@pytest.mark.parametrize(("fault", "code"), [("mesh", 2), ("exit", 5)])
def test_exit_codes_under_plain_mpirun(
    fault: str, code: int, launcher: str, tmp_path: Path
) -> None:
    process = start(*plain_launcher(launcher, tmp_path, [str(SCRIPT), str(tmp_path), fault]))
    outcome = finish(process, tmp_path)
    assert outcome.seconds < LIMIT
    assert outcome.code == code
    expected = "error: " if fault == "mesh" else "rank 1: exit with code 5"
    assert outcome.says_once(expected), outcome.stderr


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("backward", 71, "[rank 1] ArithmeticError: the fault"),
        ("kill", 72, "rank 1 (process "),
    ],
)
def test_pydist_run_passes_the_cause_on(
    fault: str, code: int, text: str, name: str, tmp_path: Path
) -> None:
    process = start(*pydist_run(name, [str(SCRIPT), str(tmp_path), fault]))
    outcome = finish(process, tmp_path)
    assert outcome.seconds < LIMIT
    assert outcome.code == code
    assert outcome.says_once(text), outcome.stderr
    assert "MPI_ABORT" not in outcome.stderr


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        *((name, signal.SIGINT, 130) for name in BACKENDS),
        ("gloo", signal.SIGTERM, 72),
        ("openmpi", signal.SIGKILL, -9),
    ],
)
def test_signals_to_the_launcher_end_all_ranks(
    name: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = start(*pydist_run(name, [str(SCRIPT), str(tmp_path), "sleep"]))
    deadline = time.time() + 60
    while not (tmp_path / "ready").exists() and time.time() < deadline and process.poll() is None:
        time.sleep(0.05)
    (tmp_path / "time").write_text(str(time.time()))
    process.send_signal(number)
    outcome = finish(process, tmp_path)
    assert outcome.seconds < LIMIT
    assert outcome.code == code
    assert "Traceback" not in outcome.stderr
    if number == signal.SIGINT:
        assert outcome.says_once("interrupted"), outcome.stderr
