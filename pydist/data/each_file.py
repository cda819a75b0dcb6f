"""Applies a function to all files of a data set, in several processes or on the ranks of a job."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from pydist.errors import DoesNotFit, UsageError

_T = TypeVar("_T")
_R = TypeVar("_R")

Progress = Callable[[int, int, str], None]
"""Called with (items done, items in total, the latest one or what was done)."""

Workers = int | Executor
"""A number of processes on this machine, or what runs functions elsewhere, such as on the ranks of
a job: `mpi4py.futures.MPICommExecutor`. It must be able to import pydist and to read the files."""


def for_each(
    work: Callable[[_T], _R], tasks: Sequence[_T], workers: Workers
) -> Iterator[tuple[int, _R]]:
    """Yields each task's number and result, in the order in which they are done.

    Args:
        work: a function at the top of a module.
        tasks: its arguments.
        workers: the number of processes, or an executor, which stays open; 1 is this process. More
            processes need a main module that may be imported (`if __name__ == "__main__"`).

    Raises:
        UsageError: `workers` is below 1; or the main module can't be imported.
        DoesNotFit: the system has ended a process.
    """
    if isinstance(workers, Executor):
        yield from _as_completed(_submitted(workers, work, tasks))
        return
    if workers < 1:
        raise UsageError(f"workers={workers}: at least 1")
    workers = min(workers, len(tasks))
    if workers <= 1:
        yield from enumerate(map(work, tasks))
        return
    # A fork would copy the locks of this process's threads.
    context = multiprocessing.get_context("spawn")
    has_begun = context.RawValue("b", 0)
    with ProcessPoolExecutor(workers, context, _prepare, (os.getpid(), has_begun)) as pool:
        try:
            yield from _as_completed(_submitted(pool, work, tasks))
        except BrokenProcessPool as error:
            if not has_begun.value:
                raise UsageError(
                    f"no worker process could begin: with workers={workers} a script needs "
                    '`if __name__ == "__main__":` around its calls, as each worker imports it'
                ) from error
            raise DoesNotFit(
                "a worker process was ended, probably for lack of memory: fewer workers need less"
            ) from error


def _submitted(
    pool: Executor, work: Callable[[_T], _R], tasks: Sequence[_T]
) -> dict[Future[_R], int]:
    return {pool.submit(work, task): number for number, task in enumerate(tasks)}


def _as_completed(numbers: dict[Future[_R], int]) -> Iterator[tuple[int, _R]]:
    """Yields numbers and results as tasks are done; if one fails, those not begun are left out."""
    try:
        for done in as_completed(numbers):
            yield numbers[done], done.result()
    finally:
        for each in numbers:
            each.cancel()


def _prepare(parent: int, has_begun: ctypes.c_byte) -> None:
    """Leaves interrupts to the parent, and ends this process when the parent has ended."""
    has_begun.value = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    process = multiprocessing.parent_process()
    assert process is not None
    # At once, before the next run writes the same files; unless a fork of the parent lives on.
    while os.getppid() == parent and process.is_alive():
        process.join(1)
    os._exit(1)
