"""Tests that ranks which make others hang are named, and that the job ends soon after its limit.

They run three cells of the matrix in `support.jobs.hangs`. With `PYDIST_TEST_HANGS=1` they run
twelve, which cover every phase once, and every launcher and fault several times.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pydist.launch.backends import available
from support.jobs.children import child_environment
from support.jobs.hangs import hang, make_data, seconds_allowed
from support.jobs.programs import path_of

LIMIT = 4.0
CELLS = [
    ("halo", "stop", "openmpi"),
    ("reduction", "caught", "mpich"),
    ("buckets", "spin", "gloo"),
]
MORE_CELLS = [
    ("optimizer", "return", "openmpi"),
    ("join", "spin", "openmpi"),
    ("opening", "return", "mpich"),
    ("tuning", "stop", "gloo"),
    ("backward", "caught", "openmpi"),
    ("saving", "stop", "mpich"),
    ("validation", "spin", "gloo"),
    ("loader", "caught", "mpich"),
    ("finalize", "stop", "openmpi"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hangs")
    make_data(folder)
    return folder


@pytest.mark.parametrize(
    ("phase", "fault", "launcher"),
    CELLS + (MORE_CELLS if os.environ.get("PYDIST_TEST_HANGS") else []),
)
def test_a_hang_is_named_and_ended(phase: str, fault: str, launcher: str, data: Path) -> None:
    if launcher not in [each.name for each in available()]:
        pytest.skip(f"{launcher} is not installed")
    folder = data / f"{phase}-{fault}-{launcher}"
    folder.mkdir()
    outcome = hang(folder, launcher, phase, fault, LIMIT)
    assert not outcome.complaint(phase, fault, LIMIT), outcome.stderr


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stop", "rank 0 (host machine-0, process {}) has not said that it waits: it computes"),
        ("call", "all_reduce of 3 elements of float32, sum on rank 0 and all_reduce of 1 elements"),
    ][: None if os.environ.get("PYDIST_TEST_HANGS") else 1],
)
def test_reports_say_what_ranks_of_other_machines_do(fault: str, said: str, tmp_path: Path) -> None:
    script = path_of("machines")
    result = subprocess.run(
        [sys.executable, "-m", "pydist.launch", "2", "gloo", str(script), fault],
        env=child_environment(
            PYDIST_HANG_LIMIT="3", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYDIST_TUNE="0"
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 72, result.stderr
    assert said.format((tmp_path / "pid0").read_text()) in result.stderr
    assert re.search(r"rank 1 \(host machine-1.*wait.* in call \d+ of all ranks: ", result.stderr)


PROGRAM = """
import os, sys, time, torch, pydist
from torch import nn
open("began" + os.environ["PYDIST_RANK"], "w").write(str(time.time()))
seed = int(os.environ["PYDIST_RANK"]) if sys.argv[1] == "seed" else 0
mesh = pydist.init(spatial=(2, 1, 1), seed=seed)
if sys.argv[1] == "silence":  # no other rank waits for these ranks
    time.sleep(1 + float(os.environ["PYDIST_HANG_LIMIT"]))
pydist.parallelize(nn.Conv3d(1, 1, 3), mesh)
if sys.argv[1] == "late" and mesh.rank == 1:
    time.sleep(2.5)
if sys.argv[1] == "late" or (sys.argv[1] == "left" and mesh.rank == 0):
    mesh.world.barrier()
"""


@pytest.mark.parametrize(
    ("kind", "limit", "code", "text"),
    [
        ("seed", 20, 2, "the seed differs between the ranks: 0 on rank 0, 1 on rank 1"),
        ("left", 20, 72, "rank 1 ended while this rank waits for a barrier; the last calls"),
        ("silence", 3, 0, None),
        ("late", 0, 0, None),  # disabled: a limit of 1 would end it
    ],
)
def test_what_differs_is_named_and_silence_is_no_hang(
    kind: str, limit: float, code: int, text: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-m", "pydist.launch", "2", "gloo", str(script), kind],
        env=child_environment(PYDIST_HANG_LIMIT=str(limit), OMP_NUM_THREADS="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    ended = time.time()
    assert result.returncode == code, result.stderr
    assert text in result.stderr if text else "hang" not in result.stderr
    if kind == "seed":
        began = max(float(path.read_text()) for path in tmp_path.glob("began*"))
        assert ended - began <= seconds_allowed("", 0)
