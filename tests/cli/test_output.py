"""Tests of commands whose output fails: the reader has ended, or the disk is full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pydist.cli import streams
from pydist.cli.events import followed
from pydist.errors import exit_code_of
from pydist.launch.backends import available
from pydist.train.log import PIPE_VARIABLE
from support.jobs.children import child_environment


def ended(folder: Path, output: int, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "pydist", *arguments],
        stdout=output,
        stderr=subprocess.PIPE,
        timeout=100,
        check=False,
        cwd=folder,
        env=child_environment(PYTHONUNBUFFERED=""),
    )


@pytest.fixture
def unread() -> int:
    """Yields the write end of a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "data ct --help", "data universes d --count 1"]
)  # fmt: skip
def test_a_reader_that_has_ended_ends_the_command_as_it_ends_other_tools(
    tmp_path: Path, unread: int, arguments: str
) -> None:
    found = ended(tmp_path, unread, *arguments.split())
    assert found.returncode == 141
    assert found.stderr == b""


def test_a_full_disk_at_the_output_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        found = ended(tmp_path, full.fileno(), "--help")
    assert found.returncode == 74
    assert found.stderr == b"error: standard output: No space left on device\n"


@pytest.mark.parametrize("mpi", ["openmpi", "mpich", "gloo"])
def test_a_rank_whose_output_nobody_reads(tmp_path: Path, unread: int, mpi: str) -> None:
    if mpi not in [each.name for each in available()]:
        pytest.skip(f"{mpi} is not installed")
    (tmp_path / "script.py").write_text(
        "import time, pydist\nmesh = pydist.init()\n"
        "for _ in range(200):\n    print('x', flush=True)\n    time.sleep(0.1)\n"
        "    mesh.world.barrier()\n"
    )
    found = ended(tmp_path, unread, "run", "-n", "2", "--mpi", mpi, "script.py")
    assert found.returncode == 141
    assert b"Traceback" not in found.stderr
    assert b"pydist: " not in found.stderr


def test_a_full_disk_at_the_output_ends_a_followed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())

    def listener(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def follow() -> None:
        with followed(listener):
            Path(os.environ[PIPE_VARIABLE]).write_bytes(b'{"event": "step"}\n')
            assert stopped.wait(10)  # the launcher passes it on to the ranks

    try:
        with pytest.raises(OSError, match="No space") as caught:
            follow()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert exit_code_of(caught.value) == 74


def shell(folder: Path, line: str, **extra: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", line, "sh", sys.executable],
        capture_output=True,
        timeout=100,
        check=False,
        cwd=folder,
        env=child_environment(**extra),
    )


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_obstacle(tmp_path: Path, closed: str) -> None:
    found = shell(tmp_path, f'"$1" -m pydist --version {closed}')
    assert found.returncode == 0
    assert found.stdout.startswith(b"" if ">&- 2" in closed else b"pydist ")
    assert shell(tmp_path, f'"$1" -m pydist nothing {closed}').returncode == 2


@pytest.mark.parametrize(
    ("width", "kept"),
    [("0", False), ("1", False), ("-1", False), ("x", False), ("\u0661", False), ("40", True)],
)
def test_a_width_in_which_nothing_can_be_printed(
    monkeypatch: pytest.MonkeyPatch, width: str, kept: bool
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    streams.prepare()
    assert ("COLUMNS" in os.environ) == kept


def test_the_number_of_a_closed_stream_goes_to_no_other_file(tmp_path: Path) -> None:
    program = (
        "from pydist.cli.main import main; main(['--version']); import sys; "
        "print(open(sys.executable).fileno() > 2, sys.stderr.fileno())"
    )
    found = shell(tmp_path, f'"$1" -c "{program}" 2>&-')
    assert found.stdout.splitlines()[1:] == [b"True 2"]


def test_pydist_imports_where_stderr_is_closed(tmp_path: Path) -> None:
    found = shell(tmp_path, '"$1" -c "import pydist.launch.failures" 2>&-')
    assert found.returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:surrogateescape"])
def test_output_is_printed_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    line = '"$1" -m pydist data ct d\u0151 --count 1 --shape 8 8 8'
    found = shell(tmp_path, line, PYTHONIOENCODING=encoding)
    assert found.returncode == 0, found.stderr
    assert b"samples of 8" in found.stdout
    assert rb"\u2192" in found.stdout
    assert found.stderr == b""
