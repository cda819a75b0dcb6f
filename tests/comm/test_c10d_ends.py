"""The end of ranks that gloo connects."""

from __future__ import annotations

import subprocess
import sys

from support.jobs.children import child_environment

SENDS = """
import torch, pydist
world = pydist.init().world
world.send(torch.ones(3), 1 - world.rank, tag=5)
"""


def test_a_message_that_no_rank_receives_keeps_none_from_ending(tmp_path):
    """As after an exception in a step in stages."""
    script = tmp_path / "sends.py"
    script.write_text(SENDS)
    command = [sys.executable, "-m", "pydist", "run", "-n", "2", "--mpi", "gloo", str(script)]
    subprocess.run(command, env=child_environment(), check=True, timeout=60)
