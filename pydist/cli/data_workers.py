"""Finds what works on the files of a data set: processes of this machine, or the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pydist.errors import UsageError
from pydist.launch import failures, launcher_env, mpi_library


class _Chosen(Protocol):
    @property
    def workers(self) -> int: ...


@contextmanager
def workers_of(chosen: _Chosen) -> Iterator[int | Executor | None]:
    """Yields what works on files for the first rank; `None` on the others, which have done so.

    Args:
        chosen: the command's options, with `workers`: the number of processes, which is yielded
            where no launcher has started several ranks.

    Raises:
        UsageError: there is less than one process, or ranks were started without MPI, or with
            different options.
    """
    if chosen.workers < 1:
        raise UsageError(f"--workers {chosen.workers}: at least 1")
    who = launcher_env.detect()
    if who is None or who.size == 1:
        yield chosen.workers
        return
    if who.launcher in ("pydist", "torchrun"):
        raise UsageError(
            f"{who.launcher} has started {who.size} ranks without MPI, which this command can't "
            "divide its files among: start it with mpirun or srun, or once with --workers"
        )
    world = mpi_library.world_of(who)
    failures.install(world.Get_rank(), who.size, abort=world.Abort)
    # Not the number of processes: its default is that of the cores, which machines have.
    everyone = world.gather({n: _absolute(v) for n, v in vars(chosen).items() if n != "workers"})
    if everyone is not None:
        _require_one_command(everyone)
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(world) as executor:
        yield executor  # type: ignore[misc]  # the stubs of mpi4py name another class


def require_one_process(what: str) -> None:
    """Raises `UsageError` if a launcher has started several ranks.

    Each would do all the work, and all but one find the folder in use.

    Args:
        what: the work, such as "packs files".
    """
    who = launcher_env.detect()
    if who is not None and who.size > 1:
        raise UsageError(
            f"{who.launcher} has started {who.size} ranks, but this command {what} in one "
            "process: start it once, without a launcher"
        )


def _absolute(option: Any) -> Any:
    return option.absolute() if isinstance(option, Path) else option


def _require_one_command(chosen: list[dict[str, Any]]) -> None:
    """Raises `UsageError` unless all ranks have the same options."""
    for rank, options in enumerate(chosen):
        for name, value in options.items():
            if value != chosen[0].get(name):
                raise UsageError(
                    f"the ranks of a job divide the files of one command, but {name} is "
                    f"{chosen[0].get(name)} on rank 0, {value} on rank {rank}: start other "
                    "commands as other jobs"
                )
