"""Starts the watchdog of a rank: its page of shared memory, its limit, its queries to Python.

`pydist.watchdog` describes the watchdog.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pydist import owner
from pydist._loader import native
from pydist.errors import RankLost, UsageError
from pydist.launch.elsewhere import Elsewhere, Place, Waiting, waiting_at
from pydist.launch.launcher_env import Identity
from pydist.launch.launcher_socket import LauncherSocket
from pydist.watchdog import MODULE_PATH

VARIABLE = "PYDIST_HANG_LIMIT"
"""Environment variable: seconds without progress after which waiting ranks end the job; 0: off."""

DEFAULT_LIMIT = 600.0
"""Default limit in seconds, equal to that of torch's NCCL watchdog for a collective."""

_SHORTEST = 1.0
_elsewhere: list[Elsewhere] = []  # one item once ranks of other machines are known
_pages: list[str] = []  # identity of this machine's page
_JOB_VARIABLES = (
    "PYDIST_SUPERVISOR", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


def limit() -> float:
    """Returns the seconds without progress that a waiting rank allows; 0 for no limit.

    Raises:
        UsageError: the variable holds an invalid value.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_LIMIT
    except ValueError:
        seconds = math.nan
    if not (seconds == 0 or _SHORTEST <= seconds < math.inf):
        raise UsageError(f"{VARIABLE}={text}: possible are 0 (off) and seconds from 1 on")
    return seconds


def start(who: Identity) -> None:
    """Starts this process's watchdog, unless it has one, is the only rank, or the limit is 0.

    Call it before the ranks join, so that the waiting ranks detect one that never starts.

    Args:
        who: this process's place in the job.

    Raises:
        UsageError: the limit is not a number of seconds.
    """
    seconds = limit()
    if not seconds or who.size == 1 or native.is_watched():
        return
    try:
        board = _open_board(who)
    except OSError as error:
        sys.stderr.write(f"pydist: no watchdog: {error}\n")
        return
    wire = LauncherSocket.current
    number, stacks = _write_stacks_on_signal()
    # MPICH's launcher reads the job's exit code from this line, as for MPI_Abort.
    pmi = os.environ.get("PMI_FD", "") if who.launcher == "mpich" else ""
    native.start_watchdog(
        board=board,
        rank=who.rank,
        size=who.size,
        here=who.local_size,
        all_here=who.local_size >= who.size,
        host=socket.gethostname(),
        limit=seconds,
        output=os.dup(2 if wire is None else wire.fileno()),
        as_message=wire is not None,
        stacks=stacks,
        signal=number,
        questions=_answer_questions(),
        launcher=int(pmi) if pmi.isdecimal() else -1,
        farewell=f"cmd=abort exitcode={RankLost.exit_code}\n",
    )


def own_place() -> Place:
    """Returns where this rank runs; ranks whose watchdogs share a page have equal pages."""
    host, pid = socket.gethostname(), os.getpid()
    return Place(host, pid, _pages[-1] if _pages else f"{host} {pid}")


def listens() -> bool:
    """Returns whether `listen_to` has been called."""
    return bool(_elsewhere)


def listen_to(elsewhere: Elsewhere) -> None:
    """Adds the ranks of other machines to reports from now on."""
    _elsewhere.append(elsewhere)


def forget_page(who: Identity | None) -> None:
    """Unlinks the page once all ranks of this machine have opened it."""
    if who is not None:
        with contextlib.suppress(OSError):
            _path(who).unlink()


def _open_board(who: Identity) -> int:
    """Opens the page that the ranks of this machine share."""
    folder = _path(who).parent
    owner.make_private_folder(folder)
    _sweep(folder, _path(who))
    board = os.open(_path(who), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    # Every rank holds a shared lock until it ends. A rank that gets the exclusive lock is the first
    # one: the page then holds data of an earlier job.
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(board, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(board, 0)
    fcntl.flock(board, fcntl.LOCK_SH)
    file = os.fstat(board)
    _pages.append(f"{owner.kernel()} {file.st_dev} {file.st_ino}")
    return board


def _sweep(folder: Path, own: Path) -> None:
    """Removes the pages of jobs whose ranks have all ended."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path == own:
                continue
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def _path(who: Identity) -> Path:
    """Returns the page's path: the same on all ranks of a job on one machine, and on no others."""
    facts = [who.launcher, str(who.size)]
    facts += [f"{name}={os.environ[name]}" for name in _JOB_VARIABLES if name in os.environ]
    if not {"PYDIST_SUPERVISOR", "PMIX_NAMESPACE", "SLURM_JOB_ID"} & os.environ.keys():
        # With the start, as process ids are reused.
        started = "".join(owner.stat_of(os.getppid())[19:20])
        facts.append(f"{os.getppid()} {started}")
    base = Path("/dev/shm")
    if not base.is_dir():
        base = Path(tempfile.gettempdir())
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    return base / f"pydist-{os.getuid()}" / key


def _write_stacks_on_signal() -> tuple[int, int]:
    """Makes faulthandler write a thread's stack on a signal, even while native code holds the GIL.

    It does not write the stacks of all threads: for a running thread it reads freed memory, and
    crashes.

    Returns:
        The signal, and the descriptor that its handler writes to; -1 where that is unsupported, and
        in threads that may not handle signals.
    """
    if not hasattr(os, "memfd_create") or threading.current_thread() is not threading.main_thread():
        return 0, -1
    number = signal.SIGRTMIN + 11
    stacks = os.memfd_create("pydist stacks")
    # The handler that remains after faulthandler ends with the interpreter.
    signal.signal(number, signal.SIG_IGN)
    faulthandler.register(number, file=stacks, all_threads=False, chain=False)
    return number, stacks


def _answer_questions() -> int:
    """Returns the descriptor for the watchdog's queries; see `Question` in `csrc/watchdog`."""
    reads, writes = os.pipe()

    def listen() -> None:
        while question := os.read(reads, 1):
            waiting, layer = Waiting(), ""
            with contextlib.suppress(Exception):  # attributes of user objects may raise anything
                waiting = waiting_at(map(_outwards, _stacks()))
            if question == b"?":  # a report is due: the slow search for the layer comes last
                native.answer_watchdog("", waiting.call)
                for each in _elsewhere:
                    each.ask(waiting)
                with contextlib.suppress(Exception):
                    layer = layer_at_work()
                native.answer_watchdog(layer, waiting.call)
            else:
                for each in _elsewhere:
                    each.tell(waiting if question == b"w" else None)

    threading.Thread(target=listen, name="pydist watchdog", daemon=True).start()
    return writes


def layer_at_work() -> str:
    """Returns the path of the parallelized module that a thread is in; "" if in none.

    In forward it is the innermost module on the stack, in backward the module whose parameters the
    backward function has saved.
    """
    stacks = _stacks()
    for find in (_called_module, _module_in_backward):
        for stack in stacks:
            for frame in _outwards(stack):
                path = find(frame)
                if path:
                    return path
    return ""


def _stacks() -> list[FrameType]:
    """Returns the innermost frame of each other thread."""
    own = threading.get_ident()
    return [frame for ident, frame in sys._current_frames().items() if ident != own]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _called_module(frame: FrameType) -> str:
    module = frame.f_locals.get("self")
    return str(getattr(module, "__dict__", {}).get(MODULE_PATH, ""))


def _module_in_backward(frame: FrameType) -> str:
    saved: Any = getattr(frame.f_locals.get("ctx"), "saved_tensors", ())
    places = {tensor.data_ptr() for tensor in saved if tensor is not None}
    return _owner_of(places) if places else ""


def _owner_of(places: set[int]) -> str:
    """Returns the path of the module with a parameter at one of the addresses."""
    import gc

    import torch

    for module in gc.get_objects():
        # Not isinstance, which reads `__class__`: some objects warn on any access.
        if issubclass(type(module), torch.nn.Module) and MODULE_PATH in module.__dict__:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.data_ptr() in places:
                    return str(module.__dict__[MODULE_PATH])
    return ""
