"""Tests of ranks that join a job whose processes have unequal or scarce variables."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from support.jobs.children import child_environment

FROM_SLURM = """
import os, torch
if os.environ["SLURM_PROCID"] == "0":
    os.environ["OMP_NUM_THREADS"] = "1"
from pydist.runtime import connect
from pydist.launch.launcher_env import detect
who, world = detect(), connect("c10d")
total = torch.ones(1)
world.all_reduce(total)
assert (world.size, total.item()) == (2, 2.0)
assert detect() == who and (who.launcher, who.local_rank) == ("slurm", world.rank)
"""


def test_ranks_of_srun_keep_their_place_whichever_have_a_number_of_threads(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "1"}
    job |= {"SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    for rank in ("0", "1"):
        environment = child_environment(**job, SLURM_PROCID=rank, SLURM_LOCALID=rank)
        environment.pop("OMP_NUM_THREADS", None)
        command = [sys.executable, "-c", FROM_SLURM]
        ranks.append(subprocess.Popen(command, env=environment, cwd=tmp_path))
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
