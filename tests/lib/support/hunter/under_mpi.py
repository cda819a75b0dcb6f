"""Runs programs on rank-threads, and those that are equal there also as an MPI job."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from support.hunter.generator import ranks_of
from support.hunter.hunt import LIMIT, Answer, Tally, Task, answered, examine, warm_up
from support.hunter.isolation import each_isolated
from support.hunter.job import run_job
from support.hunter.judge import Run, Verdict, run_whole, verdict_of
from support.hunter.program import Program

BATCH = 100
"""Number of programs per MPI job."""


def hunt_mpi(
    tasks: Iterable[Task], seconds: float, workers: int, ranks: int, mpi: str, programs: int
) -> Tally:
    """Examines programs with `ranks` ranks; those equal on rank-threads also run as an MPI job.

    Args:
        tasks: those with other numbers of ranks are skipped.
        seconds: time after which no further program starts on rank-threads.
        workers: concurrent processes, on rank-threads.
        ranks: ranks of the programs.
        mpi: openmpi, mpich or gloo.
        programs: maximum number of programs.

    Returns:
        Counts of the outcomes under MPI, and failures on rank-threads.
    """
    warm_up()
    deadline = time.monotonic() + seconds
    tally, equal = Tally(), list[tuple[int, Program]]()

    def fitting() -> Iterator[Task]:
        left = programs
        for task in tasks:
            if not left or time.monotonic() > deadline:
                return
            if ranks_of(*task) == ranks:
                left -= 1
                yield task

    for task, answer in each_isolated(examine, fitting(), LIMIT, workers):
        seed, found = task[0], answered(task, answer)
        if found.verdict.outcome == "equal" and found.program is not None:
            equal.append((seed, found.program))
        else:
            tally.count(seed, found)
    for first in range(0, len(equal), BATCH):
        for seed, verdict in judged_under_mpi(equal[first : first + BATCH], ranks, mpi):
            tally.count(seed, Answer(verdict, [], None))
    return tally


def judged_under_mpi(
    programs: Sequence[tuple[int, Program]], ranks: int, mpi: str
) -> Iterator[tuple[int, Verdict]]:
    """Yields the verdicts on programs that run one after another in MPI jobs."""
    rest = list(programs)
    while rest:
        with tempfile.TemporaryDirectory(prefix="pydist-hunt-") as folder:
            output, runs = run_job(Path(folder), [p for _, p in rest], ranks, mpi)
        for (seed, program), found in zip(rest, runs, strict=False):
            ((_, verdict),) = each_isolated(_compared, [(program, found)], LIMIT)
            yield seed, verdict
        rest = rest[len(runs) :]
        if rest:  # the job ended at the next program
            yield rest[0][0], Verdict("crash", f"under {mpi}: {output[-800:]}")
            rest = rest[1:]


def _compared(case: tuple[Program, list[Run]]) -> Verdict:
    program, runs = case
    return verdict_of(program, run_whole(program), runs)
