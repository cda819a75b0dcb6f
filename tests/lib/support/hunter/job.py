"""Runs programs as an MPI job, in which each rank writes the values that it saw to a folder."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.hunter.judge import Run, run_rank, settings
from support.hunter.program import Program

SECONDS = 300.0
"""Time limit of a job."""


def run_job(
    folder: Path, programs: Sequence[Program], ranks: int, mpi: str
) -> tuple[str, list[list[Run]]]:
    """Runs programs one after another, up to the first that fails on a rank.

    Returns:
        The output, and the runs, in rank order, of each program that all ranks completed.
    """
    (folder / "programs").write_bytes(pickle.dumps(list(programs)))
    command = [sys.executable, "-m", "pydist.launch", str(ranks), mpi]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-m", "support.hunter.job", str(folder)],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    runs: list[list[Run]] = []
    for i in range(len(programs)):
        files = [folder / f"run-{i}-{rank}" for rank in range(ranks)]
        if not all(file.exists() for file in files):
            break
        runs.append([pickle.loads(file.read_bytes()) for file in files])
    return (folder / "log").read_text(errors="replace"), runs


def main(folder: Path) -> None:
    """Runs one rank of the job."""
    from pydist.runtime import connect

    world = connect()
    with settings():
        for i, program in enumerate(pickle.loads((folder / "programs").read_bytes())):
            run = run_rank(program, world)
            if run.failed is not None:
                number, error = run.failed
                raise RuntimeError(f"program {i}, statement {number}: {error}\n{run.trace}")
            partial = folder / f"part-{i}-{world.rank}"
            partial.write_bytes(pickle.dumps(run))
            partial.rename(folder / f"run-{i}-{world.rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
