"""Hypothesis profiles, and `@pytest.mark.ranks(n)`: test modules that run as jobs of n ranks.

    pytestmark = pytest.mark.ranks(4)  # also: mpi=("openmpi", "mpich", "gloo"), seconds=120

    def test_something(world):                    # `world` is the transport over all ranks
        ...

Plain `pytest` starts one job for all tests of the module and reads each test's result from it.
A failure on any rank ends all ranks of the job, since others may be waiting for it; later tests
are reported as not run, as after the mark's `seconds` without the end of another test.
`PYDIST_TEST_MPI=mpich pytest ...` selects the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported: the ranks of a test share few cores, as threads or as processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from pydist.launch.backends import available
from support.jobs.children import child_environment

if TYPE_CHECKING:
    from pydist.comm import Transport

_REPORT = "PYDIST_TEST_REPORT"
"""Variable, set within a job: the file to which rank 0 appends the outcome of each test."""

_DEADLINE = "PYDIST_TEST_DEADLINE"
"""Variable: the time in seconds since 1970 from which no further test begins; CI sets it."""

_LATE = f"no time left ({_DEADLINE})"

_TEST_SECONDS = 120
"""Within which a job of ranks reports the end of another test."""

_STUCK_SECONDS = 800
"""After which a test that pytest-timeout can't interrupt ends its process, with all stacks shown.

pytest-timeout raises an exception in the main thread, which comes never while that waits in native
code.
"""

if _REPORT not in os.environ:  # in a job, each rank would wait for the import, and draw its own
    import hypothesis

    hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
    # The same examples in every run; `dev` draws new ones each time, `nightly` draws many.
    hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
    hypothesis.settings.register_profile("nightly", max_examples=5000, deadline=None)
    _default_profile = "ci" if os.environ.get("CI") else "dev"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", _default_profile))


@pytest.fixture(scope="session")
def world() -> Transport:
    """Returns the transport over all ranks of the job."""
    if _REPORT not in os.environ:
        pytest.fail("the fixture `world` needs the mark `ranks`", pytrace=False)
    from pydist.runtime import connect

    return connect()


def pytest_configure(config: pytest.Config) -> None:
    _keep_freed_memory()
    # Here, output is not captured yet.
    config.stash[_stderr_key] = os.dup(2)
    # Convolutions use the fixed rule: autotuning on a loaded machine is not reproducible. The
    # autotune tests must not write to the user's cache. Child processes inherit both variables.
    if _REPORT not in os.environ:
        os.environ["PYDIST_TUNE"] = "0"
        os.environ["PYDIST_CACHE"] = str(_directory(config) / "cache")


def _keep_freed_memory() -> None:
    """Makes glibc's allocator keep up to 1 GiB of freed memory, so that no page is cleared twice.

    Rank-threads share one arena; per-thread arenas would return large blocks to the system.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_top_pad, m_mmap_max, m_arena_max = -1, -2, -4, -8
        mallopt(m_arena_max, 1)
        mallopt(m_mmap_max, 0)
        mallopt(m_top_pad, 64 << 20)
        mallopt(m_trim_threshold, 1 << 30)


def pytest_collection_finish() -> None:
    if _REPORT in os.environ and "hypothesis" in sys.modules:
        raise pytest.UsageError("ranks of a job draw different examples: take ranks in threads")
    # Modules and tests loaded by now stay alive to the end: excluding these objects, nearly all
    # of the process, from garbage collection saves a third of the time.
    gc.collect()
    gc.freeze()


_stderr_key = pytest.StashKey[int]()


# -- outside the job ------------------------------------------------------------------------


@dataclass
class _Job:
    """One run of a module's tests under one launcher."""

    mpi: str
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    output: str = ""


_jobs: dict[Path, list[_Job]] = {}


def pytest_itemcollected(item: pytest.Item) -> None:
    # A job has its own limit. That of pytest-timeout would end the worker, outside of any test.
    if item.get_closest_marker("ranks") is not None and _REPORT not in os.environ:
        item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _REPORT in os.environ:
        return
    stderr = item.config.stash[_stderr_key]
    faulthandler.dump_traceback_later(_STUCK_SECONDS, exit=True, file=stderr)
    if _is_late():  # ranks of a job would not agree on the time
        pytest.skip(_LATE)


def pytest_runtest_logfinish() -> None:
    if _REPORT not in os.environ:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    mark = item.get_closest_marker("ranks")
    if mark is None or _REPORT in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if item.path not in _jobs and _is_late():
        outcome, text = "skipped", (item.nodeid, 0, f"Skipped: {_LATE}")
    else:
        outcome, text = _outcome_in_jobs(item, mark)
    for when in ("setup", "call", "teardown"):
        item.ihook.pytest_runtest_logreport(
            report=pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords=dict.fromkeys(item.keywords, 1),
                outcome=outcome if when == "call" else "passed",
                longrepr=text if when == "call" else None,
                when=when,
            )
        )
    # As after a test in this process: fixtures that earlier tests left in this folder end here.
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _is_late() -> bool:
    return time.time() >= float(os.environ.get(_DEADLINE, "inf"))


def _outcome_in_jobs(item: pytest.Item, mark: pytest.Mark) -> tuple[str, object]:
    """Returns the outcome of a test and its text; the first test of a module runs the jobs."""
    if item.path not in _jobs:
        nodeids = [
            each.nodeid
            for each in item.session.items
            if each.path == item.path and each.get_closest_marker("ranks") is not None
        ]
        _jobs[item.path] = [
            _run_job(item, nodeids, mpi, mark.args[0], mark.kwargs.get("seconds", _TEST_SECONDS))
            for mpi in _launchers(mark.kwargs.get("mpi", "auto"))
        ]
    return _verdict(item.nodeid, _jobs[item.path])


def _launchers(wanted: str | Sequence[str]) -> list[str]:
    wanted = os.environ.get("PYDIST_TEST_MPI") or wanted
    at_hand = [backend.name for backend in available()]
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    return [name for name in names if name == "auto" or name in at_hand]


def _run_job(
    item: pytest.Item, nodeids: Sequence[str], mpi: str, ranks: int, seconds: float
) -> _Job:
    job = _Job(mpi)
    directory = _directory(item.config)
    name = f"{item.path.stem}-{mpi}-{len(_jobs)}"
    report, log = directory / f"{name}.jsonl", directory / f"{name}.log"
    report.touch()
    command = [sys.executable, "-m", "pydist.launch", str(ranks), mpi]
    command += [
        "-m",
        "pytest",
        "-q",
        "--color=no",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=60",
    ]
    root = item.config.rootpath
    command += [f"--rootdir={root}", "-c", str(item.config.inipath)]
    command += [str(root / nodeid) for nodeid in nodeids]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=child_environment(**{_REPORT: str(report)}),
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = _wait(process, report, seconds)
            job.output = f"the job ended with code {code}\n"
        except subprocess.TimeoutExpired:
            job.output = f"the job was ended: no test ended within {seconds} s\n"
        finally:
            _end(process)
    job.output += log.read_text(errors="replace")
    for line in report.read_text().splitlines():
        outcome = json.loads(line)
        job.outcomes[outcome["nodeid"]] = outcome
    return job


def _wait(process: subprocess.Popen[bytes], report: Path, seconds: float) -> int:
    """Returns the exit code; raises `TimeoutExpired` if no test ends for so many seconds."""
    while True:
        known = report.stat().st_size
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            if report.stat().st_size == known:
                raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Sends Ctrl-C, and a second one, after which the launcher kills all ranks."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
    process.kill()


_directory_key = pytest.StashKey[Path]()


def _directory(config: pytest.Config) -> Path:
    if _directory_key not in config.stash:
        directory = tempfile.TemporaryDirectory(prefix="pydist-test-")
        config.add_cleanup(directory.cleanup)
        config.stash[_directory_key] = Path(directory.name)
    return config.stash[_directory_key]


def _verdict(nodeid: str, jobs: Sequence[_Job]) -> tuple[str, object]:
    """Returns the outcome of a test over all its jobs, and the text to show."""
    if not jobs:
        return "skipped", (nodeid, 0, "Skipped: none of its MPI launchers is installed")
    for job in jobs:
        outcome = job.outcomes.get(nodeid)
        if outcome is None:
            return "failed", f"[{job.mpi}] no result: {job.output[-8000:]}"
        if outcome["outcome"] == "failed":
            return "failed", f"[{job.mpi}] {outcome['text']}\n{job.output[-8000:]}"
    skipped = [job.outcomes[nodeid] for job in jobs if job.outcomes[nodeid]["outcome"] == "skipped"]
    if len(skipped) == len(jobs):
        return "skipped", (nodeid, 0, skipped[0]["text"])
    return "passed", None


# -- inside the job -------------------------------------------------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(_REPORT)
    if path is None:
        return
    from pydist.launch import failures, launcher_env

    who = launcher_env.detect()
    rank = 0 if who is None else who.rank
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    if report.failed or (rank == 0 and (report.when == "call" or report.skipped)):
        line = json.dumps({"nodeid": report.nodeid, "outcome": report.outcome, "text": text})
        with Path(path).open("a") as file:  # one write a line: ranks do not mix
            file.write(line + "\n")
    if report.failed:
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))
        failures.fail(SystemExit(1))
