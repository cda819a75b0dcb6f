"""Tests of `pydist store exec`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pydist.cli import store
from pydist.cli.main import main
from pydist.errors import UsageError
from pydist.packs import pack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
PYDIST = [sys.executable, "-m", "pydist", "store", "exec"]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    (tmp_path / "files" / "sub").mkdir(parents=True)
    (tmp_path / "files" / "hello").write_text("hello\n")
    (tmp_path / "files" / "sub" / "program").write_text("#!/bin/sh\necho from the pack\n")
    (tmp_path / "files" / "sub" / "program").chmod(0o755)
    pack(tmp_path / "files", tmp_path / "packs")
    return tmp_path / "packs"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYDIST, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_program_runs_and_its_exit_code_is_passed_on(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    script = "cat hello; ./sub/program; cp hello results/copy; echo $PYDIST_MOUNT_FOLDERS; exit 5"
    ended = run(
        *("--mount", "/nowhere/data", "--packs", packed, "--output", out),
        *("--profile", tmp_path / "profile.json", "--", "sh", "-c", f"cd /nowhere/data; {script}"),
    )
    *lines, folders = ended.stdout.splitlines()
    assert lines == ["hello", "from the pack"]
    assert ended.returncode == 5, ended.stderr
    assert Path(folders).name.startswith("mount.tmp-")
    assert not Path(folders).exists()
    assert (out / "copy").read_text() == "hello\n"
    report = json.loads((tmp_path / "profile.json").read_text())
    assert report["calls"]["read"]["bytes"] > 0
    assert "threads" in ended.stderr.splitlines()[0]


@pytest.mark.parametrize("program", ["program", "//data/sub/program", "/data/../data/sub/program"])
def test_a_program_in_the_pack_is_started(
    packed: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"/data/sub:{os.environ['PATH']}")
    ended = run("--mount", "/data", "--packs", packed, "--", program)
    assert (ended.stdout, ended.returncode) == ("from the pack\n", 0)


def test_a_signal_reaches_the_program(packed: Path) -> None:
    script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [*PYDIST, "--mount", "/data", "--packs", packed, "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.send_signal(signal.SIGTERM)
        assert started.stdout.read() == "caught\n"
    assert started.returncode == 3


def test_a_signal_that_arrives_as_the_program_starts_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"

    class Early(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            while not ready.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Early)
    script = f"trap 'exit 3' TERM; touch {ready}; while :; do sleep 0.05; done"
    assert store._run(["sh", "-c", script], {**os.environ, "PYDIST_MOUNT": "/data"}) == 3


def test_a_library_whose_path_has_a_space(packed: Path, tmp_path: Path) -> None:
    from pydist.cli import mounting

    folder = tmp_path / "a place: here"
    folder.mkdir()
    shutil.copy(mounting._library(), folder)
    found = mounting._environment({}, folder / mounting.LIBRARY, tmp_path)
    link = tmp_path / mounting.LIBRARY
    assert found["LD_PRELOAD"].split(":")[0] == str(link)
    assert link.read_bytes() == mounting._library().read_bytes()


def test_a_folder_that_others_can_change_is_not_used(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydist.cli import mounting

    monkeypatch.setattr(mounting.os, "access", lambda *_: False)  # no /dev/shm
    monkeypatch.setattr(mounting.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"pydist-mounts-{os.getuid()}").mkdir(mode=0o755)
    with (
        pytest.raises(UsageError, match="not a folder of this user alone"),
        mounting.mounted("/data", str(packed)),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mount", "data", "--packs", "PACKS"], "an absolute path below / is needed"),
        (["--mount", "/", "--packs", "PACKS"], "an absolute path below / is needed"),
        (["--mount", "LINK/data", "--packs", "PACKS"], "it leads through a symbolic link"),
        (["--mount", "/data"], "--packs, --profile or both are needed"),
        (["--mount", "/data", "--packs", "nothing"], "nothing"),
        (["--mount", "/data", "--packs", "PACKS", "--large", "x"], "--large x: a size is expected"),
        (["--mount", "/data", "--packs", "PACKS", "--output", "hello"], "the pack has 'hello'"),
        (["--mount", "/data", "--packs", "PACKS", "--output", "a/b=x"], "the name is one folder"),
        (["--mount", "/data", "--profile", "no/where"], "there is no folder no"),
        (["--mount", "/data", "--profile", "x", "--output", "o"], "--output needs --packs"),
    ],
)
def test_mistakes_are_one_line(
    packed: Path,
    tmp_path: Path,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "files")
    places = {"PACKS": str(packed), "LINK/data": str(tmp_path / "link" / "data")}
    given = [places.get(argument, argument) for argument in arguments]
    assert main(["store", "exec", *given, "--", "true"]) in (2, 65)
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_program_is_needed(packed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "exec", "--mount", "/data", "--packs", str(packed)]) == 2
    assert "no program was given after --" in capfd.readouterr().err
    given = ["--mount", "/data", "--packs", str(packed), "--", "no-such-program"]
    assert main(["store", "exec", *given]) == 127
    error = capfd.readouterr().err
    assert "no-such-program: not found" in error
    assert len(error.splitlines()) == 1
