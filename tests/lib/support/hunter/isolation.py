"""Runs programs in their own processes, so that a crash or hang ends only one of them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from support.hunter.judge import Verdict, settings

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class _Slot:
    task: Any
    process: Any
    answer: Connection
    deadline: float


def each_isolated(
    function: Callable[[T], R], tasks: Iterable[T], seconds: float, workers: int = 1
) -> Iterator[tuple[T, R | Verdict]]:
    """Yields results of `function(task)`, each from a forked process, as they become ready.

    Args:
        function: runs in the child; its result is pickled.
        tasks: start as workers become free.
        seconds: time limit after which a child counts as a hang and is killed.
        workers: number of concurrent children.

    Yields:
        Each task with its result, or with the verdict `crash` or `hang` of its process.
    """
    context = multiprocessing.get_context("fork")
    source, slots = iter(tasks), list[_Slot]()
    more = True
    while more or slots:
        while more and len(slots) < workers:
            try:
                task = next(source)
            except StopIteration:
                more = False
                break
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(function, task, theirs), daemon=True)
            process.start()
            theirs.close()
            slots.append(_Slot(task, process, mine, time.monotonic() + seconds))
        if not slots:
            break
        ready = wait([s.answer for s in slots], timeout=1.0)
        for slot in list(slots):
            if slot.answer in ready:
                result = _result(slot)
            elif time.monotonic() > slot.deadline:
                slot.process.kill()
                result = Verdict("hang", f"the process did not end within {seconds:g} s")
            else:
                continue
            slot.process.join()
            slot.answer.close()
            slots.remove(slot)
            yield slot.task, result


def _result(slot: _Slot) -> Any:
    try:
        result = slot.answer.recv()
    except EOFError:
        slot.process.join()
        return Verdict("crash", f"the process died with code {slot.process.exitcode}")
    # A child may hang at its end, in threads of a program that has not ended.
    slot.process.kill()
    return result


def _child(function: Callable[[T], R], task: T, answer: Connection) -> None:
    # glibc reports a damaged heap through the exit code.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    faulthandler.disable()
    try:
        with settings():
            answer.send(function(task))
    except BaseException:
        answer.send(Verdict("crash", f"the hunter itself: {traceback.format_exc()[-600:]}"))
    os._exit(0)
