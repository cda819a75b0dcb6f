"""Handles a failed rank: reports the error, once for the job, and ends all ranks.

A rank that merely ended would leave the others waiting for its messages: plain `mpirun` hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import sys
import threading
import time
import traceback
from _io import _IOBase
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pydist.errors import (
    PydistError,
    RankFailed,
    Stopped,
    disk_is_full,
    exit_code_of,
    one_line,
    out_of_memory,
    output_is_gone,
)
from pydist.launch import forks

_PATIENCE = 5.0
"""Seconds that a rank waits to be ended by the rank that failed first."""

_DRAIN = 0.1
"""Seconds for the launcher to forward this rank's output, which MPICH drops at an abort."""

_FLUSH = 2.0
"""Most seconds in which open files are flushed; a pipe that no process reads would block."""

_LONGEST = 240
"""Most characters of a message of another library that is shown on one line."""


def _to_stderr(text: str) -> None:
    if sys.stderr is not None:  # closed: 2>&-
        sys.stderr.write(text)


class _Guard:
    """State of this process: which rank it is, and how it ends the job."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.claim: Callable[[int], bool] | None = None
        self.say: Callable[[str], object] = _to_stderr
        self.abort: Callable[[int], object] | None = None
        self.process = 0  # the process that has installed the hooks; a fork of it is not a rank
        self.lock = threading.Lock()

    def end_job(self, code: int) -> NoReturn:
        if self.size == 1:
            atexit._run_exitfuncs()  # no process waits for this one, so exit functions may run
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(RuntimeError):  # no thread can be started
            flushing = threading.Thread(target=_flush_files, daemon=True)
            flushing.start()
            flushing.join(_FLUSH)
        if self.abort is not None:
            time.sleep(_DRAIN)
            self.abort(code)
        os._exit(code)


def _flush_files() -> None:
    """Flushes all open files of this process, as the interpreter would at its end."""
    for each in gc.get_objects():
        if issubclass(type(each), _IOBase):  # unlike isinstance, reads no attribute
            with contextlib.suppress(Exception):
                each.flush()


_guard = _Guard()


def install(
    rank: int,
    size: int,
    *,
    claim: Callable[[int], bool] | None = None,
    say: Callable[[str], object] | None = None,
    abort: Callable[[int], object] | None = None,
) -> None:
    """Installs hooks, so that an uncaught error on this rank ends the job.

    Covers uncaught exceptions of all threads, `sys.exit` with a code other than 0, and
    `KeyboardInterrupt`. May be called again to update arguments.

    Args:
        rank: this process's rank in the job.
        size: number of ranks in the job.
        claim: called with the exit code; True on the one rank that prints. None keeps the previous
            one; without any, every rank prints.
        say: prints the text of an error; to stderr by default.
        abort: called with the exit code; ends all processes. None keeps the previous one; without
            any, only this process ends.
    """
    if size == 1 and (hasattr(sys, "ps1") or sys.flags.interactive):
        return  # an error must not end an interactive session
    _guard.rank, _guard.size = rank, size
    _guard.claim = claim or _guard.claim
    _guard.say = say or _guard.say
    _guard.abort = abort or _guard.abort
    _guard.process = os.getpid()
    sys.excepthook = _excepthook
    threading.excepthook = _thread_excepthook
    if size > 1:
        sys.exit = _exit
        forks.install()


def fail(error: BaseException) -> NoReturn:
    """Prints an error, unless another rank has done so, and ends the job with its exit code."""
    with _guard.lock:  # two threads of one rank may fail at the same time
        code = exit_code_of(error) or 1
        first = _guard.claim is None or _guard.claim(code)
        # RankFailed means that another rank reports the cause; it gets the time to do so.
        if not first or (isinstance(error, RankFailed) and _guard.size > 1):
            time.sleep(_PATIENCE)
        if first:
            _guard.say(describe(error))
        _guard.end_job(code)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Treats errors and exit codes that leave the block as the end of the program.

    For the outermost function of a command. `SystemExit` with code 0 passes through, and an error
    in a fork ends only the fork.
    """
    try:
        yield
    except SystemExit as error:
        if not exit_code_of(error):
            raise
        if _is_fork():
            forks.end(_said_at_exit(error))
        fail(error)
    except BaseException as error:
        if _is_fork():
            raise
        fail(error)


def _is_fork() -> bool:
    return _guard.process not in (0, os.getpid())


def _said_at_exit(error: SystemExit) -> int:
    """Returns the exit code and prints a text given instead of one, as the interpreter does."""
    if isinstance(error.code, str):
        _to_stderr(f"{error.code}\n")
    return exit_code_of(error)


def describe(error: BaseException) -> str:
    """Returns the text for the user: one line for expected errors, a traceback for others."""
    prefix = f"rank {_guard.rank}: " if _guard.size > 1 else ""
    if isinstance(error, SystemExit):
        said = f"{error.code}\n" if isinstance(error.code, str) else ""
        if _guard.size == 1:
            return said
        return f"{prefix}{said or f'exit with code {exit_code_of(error)}'}".rstrip() + "\n"
    if isinstance(error, KeyboardInterrupt) or output_is_gone(error):
        who = f"rank {_guard.rank} was " if _guard.size > 1 else ""
        return f"{who}interrupted\n" if isinstance(error, KeyboardInterrupt) else ""
    line = None if "PYDIST_TRACEBACK" in os.environ else _line(error)
    if line is not None:
        return f"{prefix}{line}\n"
    trace = _own_frames(error.__traceback__)
    lines = "".join(traceback.format_exception(type(error), error, trace))
    if _guard.size > 1:
        return "".join(f"[rank {_guard.rank}] {line}\n" for line in lines.splitlines())
    return lines


def _line(error: BaseException) -> str | None:
    """Returns the message of an expected error on one line; None for others."""
    if isinstance(error, PydistError):
        return f"{'' if isinstance(error, Stopped) else 'error: '}{error}"
    if isinstance(error, OSError) and disk_is_full(error):
        return f"error: {error.filename or 'standard output'}: {error.strerror}"
    if out_of_memory(error):
        return f"error: does not fit into memory: {_shortened(error)}"
    return None


def _shortened(error: BaseException) -> str:
    """Returns torch's message on one line, without its source location."""
    said = one_line(error) or type(error).__name__
    said = re.sub(r"^\[enforce fail at [^\]]*\] \.? ?(err == 0\. )?", "", said)
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the frames of the launcher's worker at its top."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if Path(file).parent != Path(__file__).parent and file != "<frozen runpy>":
            break
        trace = trace.tb_next
    return trace


def _excepthook(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if _is_fork():
        sys.__excepthook__(kind, error or kind(), trace)
        return
    fail(error or kind())


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    if _is_fork():
        threading.__excepthook__(args)
        return
    fail(args.exc_value)


class _Exit(SystemExit):
    """`SystemExit` that detects when it ends the interpreter, rather than being caught.

    The interpreter has no hook for that, and at `atexit` the code is no longer known. But the
    interpreter reads `code` just before it ends, with no Python code on the stack: only then the
    getter has no caller.
    """

    @property
    def code(self) -> object:  # type: ignore[override]
        value = self.args[0] if len(self.args) == 1 else (self.args or None)
        if sys._getframe().f_back is None and exit_code_of(SystemExit(value)):
            error = SystemExit(value)
            if _is_fork():
                forks.end(_said_at_exit(error))
            fail(error)
        return value


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)
