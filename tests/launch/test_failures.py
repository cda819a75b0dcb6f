"""Tests of failing ranks: which ends are detected, and the printed message."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pydist.launch.stderr_filter import StderrFilter
from support.jobs.children import run_python

PRELUDE = """
import os, sys, threading
from pydist.errors import RankFailed, UsageError
from pydist.launch import failures
failures.install(1, 2, claim=lambda code: {claim}, abort=lambda code: os._exit(100 + code))
failures._PATIENCE = 0.1
"""


def run(source: str, claim: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program whose failures end it with 100 + the job's exit code."""
    program = PRELUDE.format(claim=claim) + source
    return run_python("-c", program, folder=Path(__file__).parent, seconds=60)


@pytest.mark.parametrize(
    ("source", "code", "text"),
    [
        ("sys.exit(3)", 103, "rank 1: exit with code 3\n"),
        ("sys.exit('reason')", 101, "rank 1: reason\n"),
        ("raise UsageError('one line')", 102, "rank 1: error: one line\n"),
        ("raise KeyboardInterrupt", 230, "rank 1 was interrupted\n"),
        ("raise RankFailed('rank 0 failed')", 171, "rank 1: error: rank 0 failed\n"),
        ("raise MemoryError", 166, None),
        ("with failures.guarded(): raise SystemExit(4)", 104, "rank 1: exit with code 4\n"),
    ],
)
def test_ends_that_end_the_job(source: str, code: int, text: str | None) -> None:
    result = run(source)
    assert result.returncode == code
    if text is not None:
        assert result.stderr == text


@pytest.mark.parametrize(
    "source",
    [
        "sys.exit(0)",
        "sys.exit()",
        "sys.exit(None)",
        "try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3",
        "with failures.guarded(): sys.exit(0)",
        "threading.Thread(target=lambda: sys.exit(3)).start()",  # ends that thread only
    ],
)
def test_ends_that_do_not(source: str) -> None:
    result = run(source)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_a_traceback_carries_the_rank_on_every_line() -> None:
    result = run("def broken():\n    raise ValueError('two\\nlines')\nbroken()")
    assert result.returncode == 171
    lines = result.stderr.splitlines()
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[-2:] == ["[rank 1] ValueError: two", "[rank 1] lines"]


def test_exceptions_of_threads_end_the_job() -> None:
    result = run("def broken(): 1 / 0\nt = threading.Thread(target=broken); t.start(); t.join()")
    assert result.returncode == 171
    assert "ZeroDivisionError" in result.stderr


def test_a_rank_that_is_not_the_first_is_silent() -> None:
    result = run("raise ValueError('again')", claim=False)
    assert result.returncode == 171
    assert result.stderr == ""


def test_open_files_keep_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    result = run(
        "failures._FLUSH = 0.5\n"
        f"log = open({str(path)!r}, 'w')\n"
        "log.write('0.5')\n"
        "_, end = os.pipe(); os.set_blocking(end, False)\n"
        "os.write(end, bytes(1 << 20)); os.set_blocking(end, True)\n"
        "full = os.fdopen(end, 'w')\n"
        "full.write('this can never be flushed')\n"
        "raise ValueError\n"
    )
    assert result.returncode == 171
    assert path.read_text() == "0.5"


def test_the_stderr_filter_keeps_characters_of_several_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for failed in (False, True):
        stream = StderrFilter()
        for byte in "é█\n".encode():
            stream.feed(bytes([byte]), failed)
        stream.feed("é".encode()[:1], failed)
        stream.close()
        assert capsys.readouterr().err == "é█\n\ufffd"


def test_the_stderr_filter_drops_echoes_only(capsys: pytest.CaptureFixture[str]) -> None:
    rule = "-" * 74 + "\n"
    echo = f"{rule}MPI_ABORT was invoked on rank 1\n  Errorcode: 71\n{rule}"
    other = f"{rule}prterun noticed that process rank 1 exited on signal 9\n{rule}"
    stream = StderrFilter()
    stream.feed(f"before\n{echo}".encode(), failed=False)
    for byte in f"after\n{echo}{other}Abort(71) on node 1 (rank 1): x\n{rule}open".encode():
        stream.feed(bytes([byte]), failed=True)
    stream.close()
    assert capsys.readouterr().err == f"before\n{echo}after\n{other}{rule}open"
