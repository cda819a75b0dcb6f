"""The end of ranks whose buffered sends are in flight."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pydist.launch.backends import available
from support.jobs.children import child_environment

SENDS = """
import time, torch, pydist
world = pydist.init(transport="host").world
group = world.split(0, world.rank)
if world.rank == 1:
    group.send(torch.ones(5 << 20), 0, tag=7)  # this rank ends first
else:
    world.send(torch.ones(4 << 20), 1, tag=5)  # no rank receives it
    time.sleep(1)
    received = torch.zeros(5 << 20)
    group.recv(received, 1, tag=7)
    assert received.all()
"""


@pytest.mark.parametrize("mpi", ["gloo", "mpich", "openmpi"])
def test_ends_wait_for_what_ranks_receive_and_for_nothing_else(tmp_path, mpi):
    """As after an exception in a step in stages, and a state dict that one rank has gathered."""
    script = tmp_path / "sends.py"
    script.write_text(SENDS)
    if mpi not in [each.name for each in available()]:
        pytest.skip(f"{mpi} is not installed")
    command = [sys.executable, "-m", "pydist", "run", "-n", "2", "--mpi", mpi, str(script)]
    subprocess.run(command, env=child_environment(), check=True, timeout=60)
