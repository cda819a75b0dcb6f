"""Finds what works on the files of a data set: processes of this machine, or the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from pydist.errors import UsageError
from pydist.launch import failures, launcher_env, mpi_library


@contextmanager
def workers_of(processes: int) -> Iterator[int | Executor | None]:
    """Yields what works on files for the first rank; `None` on the others, which have done so.

    Args:
        processes: the number that is yielded where no launcher has started several ranks.

    Raises:
        UsageError: ranks were started without MPI.
    """
    who = launcher_env.detect()
    if who is None or who.size == 1:
        yield processes
        return
    if who.launcher in ("pydist", "torchrun"):
        raise UsageError(
            f"{who.launcher} has started {who.size} ranks without MPI, which this command can't "
            "divide its files among: start it with mpirun or srun, or once with --workers"
        )
    world = mpi_library.world_of(who)
    failures.install(world.Get_rank(), who.size, abort=world.Abort)
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(world) as executor:
        yield executor  # type: ignore[misc]  # the stubs of mpi4py name another class
