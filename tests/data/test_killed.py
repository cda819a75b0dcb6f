"""Operations are killed: `tools/kills` does it 120 times for each of them, and this a few times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import support
from support.jobs.children import child_environment
from support.killed.operations import OPERATIONS

PROGRAM = "import sys; from support.killed.command import main; sys.exit(main())"


def test_the_next_run_completes(tmp_path: Path) -> None:
    environment = child_environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    path = [str(Path(next(iter(support.__path__))).parent), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--kills", "12", "--every", "4"],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [line.split(":")[0] for line in done.stdout.splitlines() if "12 kills; " in line]
    assert told == list(OPERATIONS)
