"""Jobs of ranks that sleep until the driver gives them work.

Contestants often can't share a process: they need other malloc settings, numbers of threads or MPI
libraries. So each such set of ranks is its own job, all jobs exist side by side, and the driver
calls one at a time. A waiting rank is blocked in a read from the driver's socket, never in MPI,
which would poll: it uses no CPU time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_VARIABLE = "PYDIST_BENCHMARK_SOCKET"
_PATIENCE = 1200.0
"""Seconds that ranks may take to start or to answer: 25 steps of a large network on a slow CPU."""


class Job:
    """Set of ranks that the driver starts, and that run the driver's tasks.

    Args:
        script: the script of each rank, which calls `serve`.
        ranks: number of ranks.
        arguments: command line of the script.
        mpi: "auto", "openmpi", "mpich" or "gloo" (no MPI); "threads" if the script starts its ranks
            itself, as threads.
        threads: threads per rank.
        python: interpreter that runs the ranks.
        variables: further environment variables.
    """

    def __init__(
        self,
        script: str | Path,
        ranks: int,
        arguments: Sequence[str] = (),
        mpi: str = "auto",
        threads: int = 1,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.ranks = ranks
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pydist-benchmark-")
        path = Path(self._folder.name, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(ranks)
        self._listener.settimeout(0.2)
        environment = {**os.environ, **(variables or {})}
        environment |= {"OMP_NUM_THREADS": str(threads), _VARIABLE: str(path)}
        launcher = [python]
        if mpi != "threads":
            launcher += ["-m", "pydist.launch", str(ranks), mpi]
        self._process = subprocess.Popen(
            [*launcher, str(Path(script).resolve()), *arguments],
            env=environment,
            cwd=Path(__file__).parent,  # not the checkout, whose pydist may not be compiled
            stdin=subprocess.DEVNULL,
        )

    def wait_for_ranks(self) -> None:
        """Waits until all ranks have started."""
        made: dict[int, Connection] = {}
        deadline = time.monotonic() + _PATIENCE
        while len(made) < self.ranks:
            if self._process.poll() is not None:
                raise SystemExit(f"a job of {self.ranks} ranks ended before it began")
            if time.monotonic() > deadline:
                raise SystemExit(f"a job of {self.ranks} ranks did not start in {_PATIENCE:.0f} s")
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            made[_receive(connection)] = connection
        self._connections = [made[rank] for rank in range(self.ranks)]

    def ask(self, what: str, **details: Any) -> list[Any]:
        """Runs a task on all ranks; returns their answers in rank order."""
        for connection in self._connections:
            _send(connection, (what, details))
        return [self._answer(connection) for connection in self._connections]

    def close(self) -> None:
        """Ends the ranks."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                _send(connection, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._listener.close()
        self._folder.cleanup()

    def _answer(self, connection: Connection) -> Any:
        if connection.poll(_PATIENCE):
            with contextlib.suppress(EOFError):
                return _receive(connection)
        self._process.terminate()
        raise SystemExit("a rank of the benchmark ended, or does not answer")


@contextmanager
def running(**jobs: Callable[[], Job]) -> Iterator[dict[str, Job]]:
    """Starts jobs, by name, and ends all of them at the end, also after an error."""
    started: dict[str, Job] = {}
    try:
        for name, start in jobs.items():
            started[name] = start()
        for job in started.values():
            job.wait_for_ranks()
        yield started
    finally:
        for job in started.values():
            job.close()


def interleave(
    contestants: Sequence[Any], rounds: int, step: Callable[[Any, int], float], warm_up: int = 1
) -> dict[Any, list[float]]:
    """Times all contestants once per round, in an order that changes from round to round.

    Args:
        contestants: arguments of `step`.
        rounds: number of timings per contestant.
        step: runs a contestant with a seed for its data; returns seconds.
        warm_up: number of earlier rounds without timing.

    Returns:
        The seconds of each contestant, by round.
    """
    order, shuffle = list(contestants), random.Random(0).shuffle
    seconds: dict[Any, list[float]] = {each: [] for each in contestants}
    for round_ in range(-warm_up, rounds):
        shuffle(order)
        for each in order:
            taken = step(each, round_ + warm_up)
            if round_ >= 0:
                seconds[each].append(taken)
        if round_ >= 0 and sys.stderr.isatty():
            sys.stderr.write(f"\rround {round_ + 1} of {rounds} ")
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    return seconds


def serve(rank: int, answer: Callable[..., Any]) -> None:
    """Runs the tasks that the driver sends to this rank, until it sends None.

    Args:
        rank: this rank.
        answer: called with the name of a task, and the details by name.
    """
    wire = socket.socket(socket.AF_UNIX)
    wire.connect(os.environ[_VARIABLE])
    connection = Connection(wire.detach())
    _send(connection, rank)
    with contextlib.suppress(EOFError):  # the driver was killed
        while (asked := _receive(connection)) is not None:
            what, details = asked
            _send(connection, answer(what, **details))


class Meter:
    """Meter that measures time and resource usage of a rank's tasks; usage explains the time.

    Args:
        of_thread: measure the calling thread, if a rank is one; else the process.
    """

    def __init__(self, of_thread: bool = False) -> None:
        self._who = resource.RUSAGE_THREAD if of_thread else resource.RUSAGE_SELF
        self._taken: dict[str, list[tuple[float, int]]] = {}

    def measure(self, name: str, run: Callable[[], Any]) -> float:
        """Runs a function under this name; returns seconds."""
        before = resource.getrusage(self._who)
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        after = resource.getrusage(self._who)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        faults = after.ru_minflt - before.ru_minflt
        self._taken.setdefault(name, []).append((cpu, faults))
        return seconds

    def usage(self, name: str) -> tuple[float, float]:
        """Returns medians over the runs so far: CPU seconds of all threads, and page faults."""
        cpu, faults = zip(*self._taken[name], strict=True)
        return statistics.median(cpu), statistics.median(faults)


def library(world: Any) -> str:
    """Returns the MPI library of a transport, with its version; or the transport's name."""
    if world.name != "mpi":
        return str(world.name)
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")


# Not `Connection.send`: torch makes it pass tensors as files that both sides map.
def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
