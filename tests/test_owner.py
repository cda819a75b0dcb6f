"""Tests of owner tags: which process made a file, and whether it still runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pydist import owner
from support.jobs.children import child_environment

DAY = 86_400


def tag_of_a_child(and_then: str = "") -> tuple[subprocess.Popen[str], str]:
    """Starts another process; returns it and its own tag."""
    source = f"from pydist import owner; print(owner.tag(), flush=True){and_then}"
    child = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def test_a_process_runs_until_it_is_killed_even_if_its_parent_does_not_ask_for_it() -> None:
    child, tag = tag_of_a_child("; input()")
    assert len(tag) <= 28
    assert owner.is_running(tag) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, still in the process table
    assert owner.is_running(tag) is False
    child.communicate()
    assert owner.is_running(tag) is False


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    realm, pid, started = owner.tag().split("-")
    assert owner.is_running(owner.tag()) is True
    assert owner.is_running(f"{realm}-{pid}-{'1' if started != '1' else '2'}") is False


def test_a_fork_has_a_tag_of_its_own() -> None:
    mine = owner.tag()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, owner.tag().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    theirs = os.read(read, 100).decode()
    assert theirs != mine
    assert owner.is_running(theirs) is False


@pytest.mark.parametrize("tag", ["00000000-1-1", "", "x", "../..", "0-0-0", "zz-1-1"])
def test_of_processes_elsewhere_nothing_is_known(tag: str) -> None:
    assert owner.is_running(tag) is None


def test_temporaries_of_dead_processes_go_and_all_others_stay(tmp_path: Path) -> None:
    child, tag = tag_of_a_child()
    child.communicate()
    dead = tmp_path / f".data.hdf5.tmp-{tag}-01234567"
    dead_folder = tmp_path / f"step-000001.tmp-{tag}-89abcdef"
    dead_folder.mkdir()
    (dead_folder / "model.safetensors").touch()
    dead_link = tmp_path / f"last.tmp-{tag}-00000000"
    dead_link.symlink_to("data.hdf5")
    abandoned = tmp_path / ".other.tmp-00000000-1-1-01234567"  # from another machine, long ago
    stay = [
        owner.temporary(tmp_path / "mine"),
        tmp_path / ".foreign.tmp-00000000-1-1-01234567",
        tmp_path / "data.hdf5",
        tmp_path / "notes.tmp-1",
    ]
    for path in (dead, abandoned, *stay):
        path.touch()
    for path in (abandoned, stay[-1]):
        os.utime(path, (0, time.time() - 2 * DAY))
    removed = owner.remove_temporaries(tmp_path)
    assert set(removed) == {dead, dead_folder, dead_link, abandoned}
    assert set(tmp_path.iterdir()) == set(stay)
    assert owner.remove_temporaries(tmp_path / "nowhere") == []
