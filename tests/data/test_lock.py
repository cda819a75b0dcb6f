"""Tests of folder locks: one writer at a time, however the previous one ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pydist.data import UniverseOptions, generate_universes, lock
from pydist.data.lock import FILE_NAME, FolderLock, Holder
from pydist.errors import CheckpointError, DiskError, UsageError
from support.jobs.children import child_environment

HOLD = """
import sys, os
from pathlib import Path
from pydist.data.lock import FolderLock
with FolderLock(Path(sys.argv[1])):
    if "fork" in sys.argv and os.fork() == 0:
        import time; time.sleep(60)
    print("held", flush=True)
    input()
"""


def holding(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Starts a process that holds a folder's lock until it reads a line."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def killed(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    child.stdout.close()


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as caught, FolderLock(folder):
        pass
    return str(caught.value)


class Clock:
    """Clock of `lock` that advances only during waits."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        """Seconds of each wait for another holder."""
        self.meanwhile: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if seconds != lock._SETTLE_SECONDS:
            self.waits.append(seconds)
            self.meanwhile()
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lock, "time", clock)
    return clock


def test_a_second_one_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    child = holding(tmp_path)
    said = refusal(tmp_path)
    host = os.uname().nodename
    assert f"{tmp_path} is in use: process {child.pid} on {host} (started " in said
    assert said.endswith("s ago) writes there; wait until it ends, or choose another folder")
    child.communicate("\n")
    assert not list(tmp_path.iterdir())
    with FolderLock(tmp_path):
        assert f"process {os.getpid()} on" in refusal(tmp_path)  # also within one process
        assert (tmp_path / FILE_NAME).exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", ["nothing", "fork"])
def test_a_killed_one_blocks_nobody(tmp_path: Path, left: str, clock: Clock) -> None:
    """A surviving fork, which keeps its files locked, does not block them either."""
    child = holding(tmp_path, left)
    killed(child)
    with FolderLock(tmp_path) as taken:
        taken.check()
    assert clock.waits == []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)


def test_of_many_that_come_together_one_gets_in(tmp_path: Path) -> None:
    """They compete for the lock of a dead process, which each of them may take."""
    killed(holding(tmp_path))
    source = (
        "import sys, time; from pathlib import Path; from pydist.data.lock import FolderLock\n"
        "from pydist.errors import UsageError\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "try:\n"
        "    with FolderLock(Path(sys.argv[1])): print('in', flush=True); input()\n"
        "except UsageError: print('refused')\n"
    )
    command = [sys.executable, "-c", source, str(tmp_path), str(time.time() + 1)]
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for _ in range(4)
    ]
    said = sorted(child.stdout.readline().strip() for child in children if child.stdout)
    for child in children:
        child.communicate("\n")
    assert said == ["in", "refused", "refused", "refused"]


def elsewhere(folder: Path, **facts: object) -> Path:
    """Writes the lock of a process on another machine."""
    holder = Holder("n07", 812, "00000000-1-1", "another kernel", time.time() - 200, "0" * 32)
    path = folder / FILE_NAME
    path.write_text(json.dumps(asdict(replace(holder, **facts))))
    return path


def test_one_on_another_machine_counts_as_long_as_it_renews_its_lease(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    path = elsewhere(tmp_path)
    renewed = path.stat().st_mtime + lock.BEAT_SECONDS

    def renew() -> None:
        if clock.now > lock.LEASE_SECONDS / 2:
            os.utime(path, (renewed, renewed))

    clock.meanwhile = renew
    assert "process 812 on n07 (started 3 min ago) writes there" in refusal(tmp_path)
    assert "was in use by process 812 on n07" in capsys.readouterr().err
    assert json.loads(path.read_text())["host"] == "n07"  # unchanged
    clock.waits.clear()
    with FolderLock(tmp_path):  # the holder has not renewed its lease
        assert sum(clock.waits) == pytest.approx(lock.LEASE_SECONDS, abs=1)


def test_a_lease_that_is_over_or_a_lock_that_is_freed_is_not_waited_for(
    tmp_path: Path, clock: Clock
) -> None:
    path = elsewhere(tmp_path)
    os.utime(path, (0, time.time() - 100))
    with FolderLock(tmp_path):
        assert clock.waits == []
    path = elsewhere(tmp_path)
    clock.meanwhile = path.unlink
    with FolderLock(tmp_path):
        assert len(clock.waits) == 1


def test_in_another_container_here_the_kernel_knows(tmp_path: Path, clock: Clock) -> None:
    """Its process ids mean nothing here, but the kernel shares file locks."""
    child = holding(tmp_path)
    path = tmp_path / FILE_NAME
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "tag": "00000000-1-1", "host": "container"}))
    assert f"process {child.pid} on container" in refusal(tmp_path)
    killed(child)
    with FolderLock(tmp_path):
        assert clock.waits == []


def test_a_lock_that_was_lost_is_noticed(tmp_path: Path) -> None:
    """A process that was stopped for longer than its lease must not write anymore."""
    with FolderLock(tmp_path) as held:
        held.check()
        elsewhere(tmp_path)
        with pytest.raises(CheckpointError, match=r"no longer belongs to this run: process 812 on"):
            held.check()
        (tmp_path / FILE_NAME).unlink()
        with pytest.raises(CheckpointError, match="its lock was deleted"):
            held.check()
        elsewhere(tmp_path)
    assert (tmp_path / FILE_NAME).exists()  # the other process's lock


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 4000, b'{"host": 1}', b"x" * 100_000,
     b'{"host":"a","pid":1e400,"tag":"","kernel":"","began":0,"token":""}',
     b'{"host":"a","pid":1,"tag":"","kernel":"","began":NaN,"token":""}'],
)  # fmt: skip
def test_what_names_no_process_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(lock, "_CREATION_SECONDS", 0.1)
    (tmp_path / FILE_NAME).write_bytes(content)
    with FolderLock(tmp_path) as held:
        held.check()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(DiskError, match=f"can't write into {tmp_path}"), FolderLock(tmp_path):
        pass


def test_a_data_set_is_made_by_one_process(tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(UsageError, match=r"is in use: process"):
        generate_universes(tmp_path, UniverseOptions(count=1, width=8))
    assert not list(tmp_path.iterdir())
    generate_universes(tmp_path, UniverseOptions(count=1, width=8))
    assert not (tmp_path / FILE_NAME).exists()
