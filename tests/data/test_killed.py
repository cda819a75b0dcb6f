"""Operations are killed: `tools/kills` does it 120 times for each of them, and this a few times."""

from __future__ import annotations

from pathlib import Path

from support import LIBRARY
from support.jobs.children import run_python
from support.killed.operations import OPERATIONS

PROGRAM = "import sys; from support.killed.command import main; sys.exit(main())"


def test_the_next_run_completes(tmp_path: Path) -> None:
    variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = "-c", PROGRAM, "--kills", "12", "--every", "4"
    done = run_python(*command, folder=tmp_path, path=[LIBRARY], seconds=280, **variables)
    assert done.returncode == 0, done.stderr
    told = [line.split(":")[0] for line in done.stdout.splitlines() if "12 kills; " in line]
    assert told == list(OPERATIONS)
