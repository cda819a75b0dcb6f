"""Tests that processes with different calls end within seconds and name them, per launcher."""

from __future__ import annotations

import pytest

from pydist.launch.backends import available
from support.jobs.children import run_python
from support.jobs.programs import path_of

SCRIPT = path_of("divided")

CASES = {
    ("openmpi", "call"): ("the ranks make different calls", " on rank 0", " on rank 1"),
    ("mpich", "known"): ("the ranks make different calls", "module 0: Conv3d"),
    ("mpich", "evaluation"): (
        "a forward in training",
        "a forward in evaluation mode",
        " on rank 1",
    ),
    ("gloo", "operand"): ("equal in training forward 3, different in 4 at the latest",),
}


@pytest.mark.parametrize(("launcher", "case"), CASES)
def test_the_job_ends_and_says_why(launcher: str, case: str) -> None:
    if launcher not in [backend.name for backend in available()]:
        pytest.skip(f"{launcher} is not installed")
    command = "-m", "pydist", "run", "-n", "2", "--mpi", launcher, SCRIPT, case
    folder = SCRIPT.parent
    done = run_python(*command, folder=folder, seconds=60, PYDIST_TUNE="0", OMP_NUM_THREADS="1")
    assert done.returncode == 2, done.stderr
    for text in CASES[launcher, case]:
        assert text in done.stderr
    assert "step 3 is done" in done.stdout
    assert "step 4 is done" not in done.stdout
