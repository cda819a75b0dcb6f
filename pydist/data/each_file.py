"""Applies a function to all files of a data set, in several processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from pydist.errors import DoesNotFit, UsageError

_T = TypeVar("_T")
_R = TypeVar("_R")

Progress = Callable[[int, int, str], None]
"""Called with (files done, files in total, the latest file)."""


def for_each(
    work: Callable[[_T], _R], tasks: Sequence[_T], workers: int
) -> Iterator[tuple[int, _R]]:
    """Yields each task's number and result, in the order in which they are done.

    Args:
        work: a function at the top of a module.
        tasks: its arguments.
        workers: the number of processes; 1 is this process. More need a main module that may be
            imported (`if __name__ == "__main__"`).

    Raises:
        UsageError: `workers` is below 1; or the main module can't be imported.
        DoesNotFit: the system has ended a process.
    """
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
        numbers = {pool.submit(work, task): number for number, task in enumerate(tasks)}
        try:
            for done in as_completed(numbers):
                yield numbers[done], done.result()
        except BrokenProcessPool as error:
            if not has_begun.value:
                raise UsageError(
                    f"no worker process could begin: with workers={workers} a script needs "
                    '`if __name__ == "__main__":` around its calls, as each worker imports it'
                ) from error
            raise DoesNotFit(
                "a worker process was ended, probably for lack of memory: fewer workers need less"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


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
