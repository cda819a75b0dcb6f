"""Commands whose output goes nowhere: to a reader that has ended, or to a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from children import child_environment


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
    """A pipe that is no longer read."""
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


def test_a_rank_whose_output_nobody_reads(tmp_path: Path, unread: int) -> None:
    (tmp_path / "script.py").write_text(
        "import pydist\nmesh = pydist.init()\nprint('x', flush=True)\nmesh.world.barrier()\n"
    )
    found = ended(tmp_path, unread, "run", "-n", "2", "--mpi", "gloo", "script.py")
    assert found.returncode == 141
    assert b"Traceback" not in found.stderr
