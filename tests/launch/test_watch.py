"""Tests of the watchdog's page, limit and questions, and the launcher's limits, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.errors import UsageError
from pydist.launch import watch
from pydist.launch.launcher_env import Identity
from support.jobs.children import child_environment, wait_until

WHO = Identity("pydist", 1, 2, 1, 2)


@pytest.mark.parametrize(("text", "seconds"), [("", 600), ("0", 0), ("2.5", 2.5)])
def test_the_limit_is_read(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch.VARIABLE, text)
    assert watch.limit() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "0.5", "nan", "inf"])
def test_other_limits_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch.VARIABLE, text)
    with pytest.raises(UsageError, match="possible are 0"):
        watch.limit()


def test_a_page_has_one_place_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in watch._JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    other_rank = Identity("pydist", 0, 2, 0, 2)
    assert watch._path(WHO) == watch._path(other_rank)
    monkeypatch.setenv("PYDIST_SUPERVISOR", "/tmp/a")
    one = watch._path(WHO)
    monkeypatch.setenv("PYDIST_SUPERVISOR", "/tmp/b")
    assert watch._path(WHO) != one


def test_pages_of_jobs_that_are_over_are_emptied_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pages"
    monkeypatch.setattr(watch, "_path", lambda _: folder / "own")
    folder.mkdir(mode=0o700)
    (folder / "own").write_text("a job that is over")
    (folder / "old").write_text("another one")
    first = watch._open_board(WHO)
    assert os.fstat(first).st_size == 0
    assert not (folder / "old").exists()
    os.write(first, b"kept")
    second = watch._open_board(WHO)  # while the first rank holds it
    assert os.fstat(second).st_size == 4
    os.close(first)
    os.close(second)


def test_pages_in_a_folder_of_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_path", lambda _: tmp_path / "open" / "own")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        watch._open_board(WHO)


def launcher(folder: Path, source: str, **variables: str) -> subprocess.Popen[str]:
    """Starts `pydist run` of two ranks without MPI in a separate process."""
    script = folder / "script.py"
    script.write_text("import os, pathlib, signal, sys, time\n" + source)
    return subprocess.Popen(
        [sys.executable, "-m", "pydist.launch", "2", "gloo", str(script)],
        env=child_environment(**variables),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    # Python runs this file first, which stops rank 1 before it joins.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if os.environ.get('PYDIST_RANK') == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    path = os.pathsep.join([str(tmp_path), child_environment().get("PYTHONPATH", "")])
    process = launcher(tmp_path, "time.sleep(60)", PYTHONPATH=path, PYDIST_HANG_LIMIT="1")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 72
    assert stderr.count("rank 1 of 2 did not start within 1 s of the first one") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 72)])
def test_one_signal_ends_ranks_that_ignore_it(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    source = (
        "for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)\n"
        "rank = os.environ['PYDIST_RANK']\n"
        "pathlib.Path('ready' + rank).touch()\n"
        "time.sleep(60)\n"
    )
    process = launcher(tmp_path, source)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stderr
    said = "pydist: SIGTERM ended the job\n" if code == 72 else "pydist: interrupted; "
    assert stderr.count(said) == 1
