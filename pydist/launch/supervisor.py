"""Starts the ranks of a job, watches them, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pydist.errors import SIGPIPE_CODE, RankLost, UsageError, output_is_unread
from pydist.launch import watch
from pydist.launch.backends import Backend, backend_named, cores
from pydist.launch.launcher_env import without_identity
from pydist.launch.launcher_socket import VARIABLE
from pydist.launch.leftovers import private_directory
from pydist.launch.processes import code_of_unreaped, in_words, is_stopped
from pydist.launch.signal_handlers import handled
from pydist.launch.stderr_filter import StderrFilter

_ABORT_GRACE = 1.0
"""Seconds that MPI has to end the job by itself after a failure, before SIGTERM."""

_SIGNAL_GRACE = 3.0
"""Seconds that ranks have to end after SIGINT, before SIGTERM, and after that before SIGKILL."""

_HANG_GRACE = 0.5
"""Seconds that ranks have to end after a report that they hang, before SIGKILL."""

_DEATH_NOTICE = 0.1
"""Seconds in which the death of a rank may still explain the error that another rank reports."""

_MOST_RANKS = 1024
"""Most ranks that are started on one machine, unless it has more cores."""

_TICK = 0.05

# Not `python -m`: it searches the current folder first, and in a checkout would find the sources,
# which have no compiled module.
_WORKER = (
    "import sys; sys.path[:] = [place for place in sys.path if place]; "
    "from pydist.launch.worker import main; main(sys.argv[1:])"
)


def launch(
    ranks: int,
    argv: Sequence[str],
    mpi: str = "auto",
    patience: float = _SIGNAL_GRACE,
    is_service: bool = False,
) -> int:
    """Runs a Python program on several ranks of this machine.

    Corrects defaults of the launchers: permission for root, more ranks than cores, no binding to
    cores, the number of threads per rank. Forwards SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 to all
    ranks. Ranks that have not ended `patience` seconds after SIGINT or SIGTERM are ended with
    SIGTERM, then SIGKILL; a second SIGINT kills them immediately. If ranks have not started within
    `PYDIST_HANG_LIMIT` seconds of the first one, the launcher names them and ends the job.

    Args:
        ranks: number of ranks, >= 1; at most 1024, or the number of cores if that is larger.
        argv: the script and its arguments, or "-m", a module and its arguments.
        mpi: "auto", "openmpi", "mpich" or "gloo" (no MPI).
        patience: seconds that ranks have to end by themselves after a first SIGINT or SIGTERM;
            more than the default for programs that then save their state.
        is_service: whether SIGINT or SIGTERM is the usual end of the program, and no failure.

    Returns:
        The exit code of the rank that failed first; 72 if a rank was killed, hangs or never
        started; 130 after SIGINT, if no rank ends with a code of its own; 141 if the output is no
        longer read; 0 if all succeeded, also after a signal to a service.

    Raises:
        UsageError: the MPI is not installed, or there is nothing to run.
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks: at least 1 is needed")
    if ranks > (most := max(_MOST_RANKS, cores())):
        raise UsageError(f"{ranks} ranks: at most {most} are started on one machine")
    if not argv or argv == ["-m"]:
        raise UsageError("no script to run was given")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise UsageError(f"no script '{argv[0]}'")
    with private_directory() as directory:
        job = _RunningJob(ranks, backend_named(mpi), directory, patience, watch.limit(), is_service)
        return job.run([sys.executable, "-c", _WORKER, *argv])


@dataclass
class _Rank:
    """State that one rank has in the launcher."""

    rank: int
    pid: int
    connection: socket.socket
    unread: bytes = b""
    ended: bool = False
    early: bool = False
    """Whether it has ended in good order before it joined the others."""


@dataclass
class _Verdict:
    """Reason why the job ends, which is the first failure."""

    code: int
    asked: bool = False
    """Whether a signal asked ranks to end; the first rank's answer then replaces this verdict."""
    hangs: bool = False
    """Whether ranks hang: they are killed without being asked to end."""
    since: float = field(default_factory=time.monotonic)


class _RunningJob:
    def __init__(
        self,
        size: int,
        backend: Backend,
        directory: Path,
        patience: float,
        hang_limit: float,
        is_service: bool,
    ) -> None:
        self._size = size
        self._is_service = is_service
        self._patience = patience
        self._hang_limit = hang_limit
        self._first_joined = 0.0
        self._stopped_since = math.inf
        self._backend = backend
        self._directory = directory
        self._ranks: dict[int, _Rank] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._verdict: _Verdict | None = None
        self._claims: list[tuple[float, _Rank, int]] = []
        self._interrupts = 0
        self._asked_to_end = False
        self._terminated: float | None = None
        self._selector = selectors.DefaultSelector()
        self._stderr = StderrFilter()

    def run(self, command: Sequence[str]) -> int:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self._directory / "socket"
        listener.bind(str(path))
        listener.listen(self._size)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        with listener, handled(numbers, self._forward):
            try:
                self._start(command, self._environment(str(path)))
                while any(child.poll() is None for child in self._children):
                    self._serve(_TICK)
                    self._enforce()
                while self._serve(0):  # messages that ranks have sent before they ended
                    pass
            finally:
                self._kill(signal.SIGKILL)
                self._stderr.close()
        return self._exit_code()

    def _environment(self, socket_path: str) -> dict[str, str]:
        environment = without_identity(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // self._size)))
        environment.update(self._backend.variables(self._size, self._directory))
        environment[VARIABLE] = socket_path
        package = Path(__file__).parents[2]
        if package.name not in ("site-packages", "dist-packages"):
            old = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = str(package) + (os.pathsep + old if old else "")
        return environment

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        # A session of its own: Ctrl-C in the terminal reaches the launcher, which forwards it.
        if self._backend.executable is not None:
            line = self._backend.command(self._size, command)
            child = subprocess.Popen(
                line, env=environment, start_new_session=True, stderr=subprocess.PIPE
            )
            assert child.stderr is not None
            os.set_blocking(child.stderr.fileno(), False)
            self._selector.register(child.stderr, selectors.EVENT_READ, self._relay)
            self._children = [child]
            return
        environment["PYDIST_SIZE"] = str(self._size)
        environment["PYDIST_STORE"] = str(self._directory / "store")
        for rank in range(self._size):
            own = {**environment, "PYDIST_RANK": str(rank)}
            self._children.append(subprocess.Popen(command, env=own, start_new_session=True))

    # -- messages of ranks ------------------------------------------------------------------

    def _serve(self, timeout: float) -> bool:
        """Handles the messages that have arrived; returns whether there were any."""
        events = self._selector.select(timeout)
        for key, _ in events:
            key.data(key.fileobj)
        return bool(events)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        rank = _Rank(-1, -1, connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(rank))

    def _relay(self, stream: IO[bytes]) -> None:
        data = os.read(stream.fileno(), 65536)
        if data:
            self._stderr.feed(data, self._verdict is not None)
        else:
            self._selector.unregister(stream)
            stream.close()

    def _read(self, rank: _Rank) -> None:
        try:
            data = rank.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(rank.connection)
            rank.connection.close()
            if not rank.ended and rank.rank >= 0:
                self._lost(rank.rank, rank.pid)
            rank.ended = True
            return
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        for line in lines:
            self._handle(rank, json.loads(line))

    def _handle(self, rank: _Rank, message: dict[str, Any]) -> None:
        if "rank" in message:
            rank.rank, rank.pid = message["rank"], message["pid"]
            self._first_joined = self._first_joined or time.monotonic()
            self._ranks[rank.rank] = rank
        elif "hang" in message:
            if self._verdict is None or not self._verdict.hangs:
                sys.stderr.write(message["hang"])
                sys.stderr.flush()
            self._verdict = _Verdict(RankLost.exit_code, hangs=True)
        elif "claim" in message:
            rank.ended = True
            self._claims.append((time.monotonic(), rank, message["claim"]))
        elif "say" in message:
            told = self._interrupts and self._verdict and self._verdict.code == 128 + signal.SIGINT
            if not told:  # that the launcher was interrupted
                sys.stderr.write(message["say"])
                sys.stderr.flush()
        elif "end" in message:
            rank.ended = True
            rank.early = not message["end"]

    def _decide(self) -> None:
        """Lets the first failed rank report, unless another rank's death explains its failure."""
        if self._claims and (self._verdict is None or self._verdict.asked):
            since, first, code = self._claims[0]
            if time.monotonic() - since < _DEATH_NOTICE:
                return
            self._verdict = _Verdict(code)
            self._answer(first, b"yes\n")
            del self._claims[0]
        if self._verdict is not None:
            for _, rank, _ in self._claims:
                self._answer(rank, b"no\n")
            self._claims.clear()

    @staticmethod
    def _answer(rank: _Rank, text: bytes) -> None:
        with contextlib.suppress(OSError):
            rank.connection.sendall(text)

    def _lost(self, rank: int, pid: int) -> None:
        """Ends the job because a rank's process has ended without a report."""
        if self._verdict is not None:
            return
        self._verdict = _Verdict(RankLost.exit_code)
        code = None
        if self._backend.executable is not None:
            code = code_of_unreaped(pid)
            # MPI's launchers end the ranks like this if they can't pass on what ranks print.
            if code in (None, -signal.SIGTERM, -signal.SIGKILL) and output_is_unread():
                self._verdict.code = SIGPIPE_CODE
                return
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._children[rank].wait(timeout=1)
        # Open MPI ends the other ranks after an early end, so that they appear to fail first.
        early = [each.rank for each in self._ranks.values() if each.early]
        cause = f"{_ranks(early)} ended with code 0 before pydist.init; then " if early else ""
        _say(f"{cause}rank {rank} (process {pid}) {in_words(code)}; ending the job")

    def _miss(self) -> None:
        """Ends the job if some ranks have not started in time after the first one."""
        missing = sorted(set(range(self._size)) - self._ranks.keys())
        waited = time.monotonic() - self._first_joined
        if self._verdict or not (missing and self._first_joined and self._hang_limit):
            return
        if waited > self._hang_limit:
            self._verdict = _Verdict(RankLost.exit_code, hangs=True)
            _say(
                f"{_ranks(missing)} of {self._size} did not start within {self._hang_limit:g} s of"
                f" the first one ({watch.VARIABLE}); ending the job"
            )

    def _release_stopped(self) -> None:
        """Ends the job if all remaining ranks are stopped, so that none of them can report it."""
        living = [rank for rank in self._ranks.values() if rank.connection.fileno() >= 0]
        some_ended = 0 < len(living) < len(self._ranks)
        if not (some_ended and self._hang_limit and all(is_stopped(r.pid) for r in living)):
            self._stopped_since = math.inf
            return
        self._stopped_since = min(self._stopped_since, time.monotonic())
        if self._verdict is None and time.monotonic() - self._stopped_since > self._hang_limit:
            self._verdict = _Verdict(RankLost.exit_code, hangs=True)
            names = _ranks([rank.rank for rank in living])
            _say(f"{names} stopped (state T) after the others have ended; ending the job")

    # -- ending the job ---------------------------------------------------------------------

    def _enforce(self) -> None:
        """Ends, after a failure, the processes that do not end by themselves."""
        self._decide()
        self._miss()
        self._release_stopped()
        if self._backend.executable is None:
            for rank, child in enumerate(self._children):
                if child.poll() and self._verdict is None and not self._claims:
                    self._lost(rank, child.pid)  # a fork of it may keep the connection open
        if self._verdict is None:
            return
        now = time.monotonic()
        if self._verdict.hangs:
            if now - self._verdict.since > _HANG_GRACE:
                self._kill(signal.SIGKILL)
            return
        # Without MPI nothing else ends the other ranks: no reason to wait.
        grace = _ABORT_GRACE if self._backend.executable is not None else 0.2
        if self._asked_to_end:
            grace = self._patience if self._verdict.asked else _SIGNAL_GRACE
        if self._terminated is None and now - self._verdict.since > grace:
            self._terminated = now
            self._kill(signal.SIGTERM)
        elif self._terminated is not None and now - self._terminated > _SIGNAL_GRACE:
            self._kill(signal.SIGKILL)

    def _kill(self, number: int) -> None:
        """Sends a signal to all remaining processes: ranks, and the MPI launcher's session."""
        for rank in self._ranks.values():
            if rank.connection.fileno() >= 0:  # the process is alive, so its id is not reused
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                if number == signal.SIGKILL:
                    child.wait()

    def _forward(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._asked_to_end = True
            self._verdict = self._verdict or _Verdict(RankLost.exit_code, asked=True)
        if number == signal.SIGINT:
            self._asked_to_end = True
            self._interrupts += 1
            if self._interrupts == 1:
                _say("interrupted; ending the ranks (interrupt again to kill them)")
                self._verdict = self._verdict or _Verdict(128 + number, asked=True)
            else:
                self._kill(signal.SIGKILL)
        for rank in self._ranks.values():
            if rank.connection.fileno() >= 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
        if not self._ranks:  # still starting
            self._kill(signal.SIGTERM)

    def _exit_code(self) -> int:
        if self._verdict is not None:
            in_order = self._verdict.asked and self._terminated is None
            if self._is_service and in_order and not any(c.returncode for c in self._children):
                return 0
            if self._verdict.asked and self._verdict.code == RankLost.exit_code:
                _say("SIGTERM ended the job")  # no rank has ended with a code of its own
            return self._verdict.code
        codes = [child.returncode for child in self._children if child.returncode]
        if not codes:
            return 0
        if output_is_unread():
            return SIGPIPE_CODE
        _say(f"{self._backend.name} ended with code {codes[0]}")
        return codes[0] if 0 < codes[0] < 128 else RankLost.exit_code


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _say(text: str) -> None:
    sys.stderr.write(f"pydist: {text}\n")
    sys.stderr.flush()
