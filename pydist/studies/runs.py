"""Starts the runs of a study, several at a time, and continues a study that was stopped.

Each run is a job of its own, with its own ranks: one that fails, by an error or because a rank
died, does not touch the others. The ranks that a study may use are divided among the runs that are
under way; a run starts as soon as enough of them are free.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pydist.data.publish import make_folder, publish
from pydist.errors import DiskError, Stopped, UsageError
from pydist.launch.backends import cores
from pydist.launch.signal_handlers import handled
from pydist.train import config_io
from pydist.train.config import Config
from pydist.train.log import LOG_FILE, read

OUTPUT_FILE = "output.txt"
"""What the job of a run has printed, in the run's folder."""
SETTINGS_FILE = "settings.toml"
"""The configuration that the job of a run gets, in the run's folder."""
_TICK = 0.05


@dataclass(frozen=True)
class Run:
    """Training that a study runs.

    Attributes:
        name: its name in tables.
        config: what is trained; the run's files are in `config.output.folder`.
        ranks: number of ranks.
    """

    name: str
    config: Config
    ranks: int = 1

    @property
    def folder(self) -> Path:
        """Folder that the run's files are in."""
        return self.config.output.folder

    @property
    def settings(self) -> Path:
        """File that gives the job its configuration."""
        return self.folder / SETTINGS_FILE


@dataclass(frozen=True)
class Outcome:
    """Outcome that a run has.

    Attributes:
        status: "done", "failed", or "stopped" by a signal.
        reason: why it failed.
        steps: steps that were done.
        loss: training loss of the last step; None without one.
        validation: figures of the last validation, by name.
        seconds: that all steps took together.
    """

    status: str
    reason: str = ""
    steps: int = 0
    loss: float | None = None
    validation: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


CommandOf = Callable[[Run], Sequence[str]]
"""Returns the command line of a run's job, which trains `Run.settings`."""
Tell = Callable[[Run, Outcome | None], None]
"""Is called with a run that starts (None), and again with its outcome."""


def run_all(runs: Sequence[Run], ranks: int, command: CommandOf, tell: Tell) -> list[Outcome]:
    """Runs the jobs of a study, as many at a time as the ranks allow.

    Runs that an earlier call has completed are kept; those that were stopped resume.

    Args:
        runs: the runs, in the order in which they start.
        ranks: number of ranks that all jobs under way may have together.
        command: gives the command line of a job.
        tell: hears of starts and ends.

    Returns:
        The outcomes, in the order of the runs.

    Raises:
        UsageError: a run needs more ranks, two runs have one folder, or a run's folder belongs to
            other settings; nothing was started.
        DiskError: a run's folder can't be written.
        Stopped: SIGINT or SIGTERM arrived; it was passed on, and the jobs have ended.
    """
    _check(runs, ranks)
    outcomes: list[Outcome | None] = [finished(run) for run in runs]
    for run, outcome in zip(runs, outcomes, strict=True):
        if outcome is not None:
            tell(run, outcome)
    waiting = [i for i, outcome in enumerate(outcomes) if outcome is None]
    under_way: dict[int, _Job] = {}
    threads = max(1, cores() // ranks)
    with _stops() as stops, _ended_on_error(under_way):
        while under_way or (waiting and not stops):
            free = ranks - sum(runs[i].ranks for i in under_way)
            while waiting and not stops and runs[waiting[0]].ranks <= free:
                first = waiting.pop(0)
                free -= runs[first].ranks
                tell(runs[first], None)
                under_way[first] = _Job(_start(runs[first], command, threads))
            for i, job in list(under_way.items()):
                job.pass_on(stops)
                if (code := job.process.poll()) is not None:
                    del under_way[i]
                    outcomes[i] = outcome_of(runs[i], code)
                    tell(runs[i], outcomes[i])
            time.sleep(_TICK)
    if stops:
        raise Stopped("the study was stopped; the same command continues it")
    return [outcome for outcome in outcomes if outcome is not None]


def finished(run: Run) -> Outcome | None:
    """Returns the outcome of a run that was completed earlier; None if there is none."""
    if not (run.folder / LOG_FILE).exists():
        return None
    found = outcome_of(run, 0)
    return found if found.status == "done" else None


def outcome_of(run: Run, code: int) -> Outcome:
    """Reads the outcome of a run whose job has ended.

    Args:
        run: the run.
        code: the job's exit code; where a rank was killed, the log has no end.
    """
    log = run.folder / LOG_FILE
    status, reason = "failed", ""
    steps, loss, seconds, validation = 0, None, {}, {}
    for event in read(log) if log.exists() else ():
        if event["event"] == "step":
            steps, loss = event["step"], event["loss"]
            seconds[steps] = event["seconds"]
            status, reason = "failed", ""
        elif event["event"] == "validation":
            own = {"event", "time", "step", "epoch", "samples"}
            validation = {name: value for name, value in event.items() if name not in own}
        elif event["event"] == "start":
            status, reason = "failed", ""
        elif event["event"] == "end":
            status, reason = event["status"], event["reason"]
    if code:
        status = "stopped" if code == Stopped.exit_code else "failed"
        reason = reason or _last_line(run.folder / OUTPUT_FILE) or f"exit code {code}"
    reason = "" if status != "failed" else reason or "it has no end in its log"
    return Outcome(status, reason, steps, loss, validation, sum(seconds.values()))


def _check(runs: Sequence[Run], ranks: int) -> None:
    folders: dict[Path, str] = {}
    for run in runs:
        if run.ranks > ranks:
            raise UsageError(f"{run.name} needs {run.ranks} ranks, and {ranks} are given (-n)")
        if run.folder in folders:
            raise UsageError(f"{run.name} and {folders[run.folder]} have the folder {run.folder}")
        folders[run.folder] = run.name
        if run.settings.exists():
            if run.settings.read_text("utf-8") != config_io.dumps(run.config):
                raise UsageError(
                    f"{run.folder} has a run with other settings: delete it, or choose another "
                    "folder"
                )
        elif (run.folder / LOG_FILE).exists():
            raise UsageError(f"{run.folder} has a run of no study: choose another folder")


@dataclass
class _Job:
    """Job that is under way, with the number of signals that it got."""

    process: subprocess.Popen[bytes]
    signals: int = 0

    def pass_on(self, stops: Sequence[int]) -> None:
        """Passes signals on that arrived since the last call.

        The first one as SIGTERM: srun answers SIGINT with the states of its tasks, and goes on.
        """
        for number in stops[self.signals :]:
            self.process.send_signal(number if self.signals else signal.SIGTERM)
            self.signals += 1


def _start(run: Run, command: CommandOf, threads: int) -> subprocess.Popen[bytes]:
    """Starts the job of a run, in a session of its own: Ctrl-C reaches this process alone."""
    make_folder(run.folder)
    publish(run.settings, config_io.dumps(run.config).encode())
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    try:
        with (run.folder / OUTPUT_FILE).open("wb") as output:
            return subprocess.Popen(
                list(command(run)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
    except FileNotFoundError as error:
        raise UsageError(f"there is no program {error.filename!r} to start ranks with") from None
    except OSError as error:
        raise DiskError(f"can't start {run.name}: {error.strerror}") from error


@contextmanager
def _ended_on_error(under_way: Mapping[int, _Job]) -> Iterator[None]:
    """Ends the jobs under way if the `with` block raises, as where the next one can't start."""
    try:
        yield
    except BaseException:
        for job in under_way.values():
            job.process.terminate()
        for job in under_way.values():
            job.process.wait()
        raise


@contextmanager
def _stops() -> Iterator[list[int]]:
    """Yields a list to which the signals are added that ask this process to end."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    with handled((signal.SIGINT, signal.SIGTERM), note):
        yield arrived


def _last_line(path: Path) -> str:
    """Returns the last line that a job has printed; empty without one."""
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()]
    return lines[-1] if lines else ""
