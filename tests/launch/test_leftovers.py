"""Tests that the next start removes a killed job's temporary files and shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pydist import owner
from pydist.launch import leftovers
from pydist.launch.backends import available
from support.jobs.children import child_environment, wait_until

SCRIPT = """
import os, pathlib, time, pydist
mesh = pydist.init()
pathlib.Path(f"pid{mesh.rank}").write_text(str(os.getpid()))
mesh.world.barrier()
pathlib.Path("ready").touch()
time.sleep(100)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Yields a separate temporary folder, the default of the process."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # sockets need a short name
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    owner.remove(folder)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_job_that_was_killed_as_a_whole(tmp_path: Path, temporary: Path, mpi: str) -> None:
    if mpi not in [backend.name for backend in available()]:
        pytest.skip(f"{mpi} is not installed")
    (tmp_path / "script.py").write_text(SCRIPT)
    job = subprocess.Popen(
        [sys.executable, "-m", "pydist", "run", "-n", "2", "--mpi", mpi, "script.py"],
        cwd=tmp_path,
        env=child_environment(),
    )
    wait_until((tmp_path / "ready").exists, job)
    ranks = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    used = {path for pid in ranks for path in leftovers._mapped(str(pid))}
    assert any(path.parent == leftovers._SHARED for path in used)
    leftovers.remove_leftovers()  # keeps files of running jobs
    assert all(path.exists() for path in used)
    parents = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in ranks} - {job.pid}
    # Stop the MPI launcher first: it would clean up.
    for pid in [*parents, job.pid, *ranks]:
        os.kill(pid, signal.SIGSTOP)
    for pid in [*parents, job.pid, *ranks]:
        os.kill(pid, signal.SIGKILL)
    job.wait()
    (directory,) = temporary.glob("pydist-*")
    wait_until(lambda: not any(owner._start_of(pid) for pid in ranks))
    with leftovers.private_directory() as mine:
        assert list(temporary.glob("pydist-*")) == [mine]
    assert not directory.exists()
    assert not any(path.exists() for path in used)
    assert not list(temporary.iterdir())


def test_session_folders_of_reused_process_numbers(tmp_path: Path, temporary: Path) -> None:
    """Open MPI's launcher fails if a killed launcher with its process id left a folder."""
    if "openmpi" not in [backend.name for backend in available()]:
        pytest.skip("openmpi is not installed")
    (tmp_path / "script.py").write_text("import os; print(os.getppid())")
    # Threads take process ids too, so the next id follows a process started now.
    latest = int(subprocess.run(["sh", "-c", "echo $$"], capture_output=True, check=True).stdout)
    stale = range(latest + 1, latest + 3000)
    for pid in stale:
        folder = temporary / f"ompi.{pid}"
        folder.mkdir()
        (folder / f"pmix.{os.uname().nodename}.tool").write_text("stale")
        (folder / f"pmix.{os.uname().nodename}.tool.{pid}").write_text("stale")
    job = subprocess.run(
        [sys.executable, "-m", "pydist", "run", "-n", "1", "--mpi", "openmpi", "script.py"],
        cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert int(job.stdout) in stale  # the launcher's process id


def test_what_is_not_ours_or_in_use_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "from pydist import owner; print(owner.tag())"],
        capture_output=True, text=True, check=True, env=child_environment(),
    ).stdout.strip()  # fmt: skip
    monkeypatch.setattr(leftovers, "_SHARED", temporary / "shm")
    (temporary / "shm").mkdir()
    listed = {name: temporary / "shm" / name for name in ("sm_segment.a", "nccl-b", "my_data")}
    other = temporary / "precious"
    for path in (*listed.values(), other):
        path.write_bytes(b"x" * 4096)
    directory = temporary / f"pydist-{dead}-abcdefgh"
    directory.mkdir()
    names = [*map(str, listed.values()), str(other), f"{temporary}/shm/../precious", "/", "here"]
    (directory / "mapped-1").write_text("\n".join(names))
    stay = [
        temporary / f"pydist-{owner.tag()}-abcdefgh",  # of a running process
        temporary / "pydist-00000000-1-1-abcdefgh",  # of another machine
        temporary / "pydist-something",
        temporary / f"pydist-{dead}-link",
    ]
    for path in stay[:-1]:
        path.mkdir()
    stay[-1].symlink_to(other)
    real = leftovers._mapped
    used = {listed["nccl-b"]}
    monkeypatch.setattr(
        leftovers, "_mapped", lambda pid: used if pid == str(os.getpid()) else real(pid)
    )
    leftovers.remove_leftovers()
    assert not directory.exists()
    assert not listed["sm_segment.a"].exists()
    for path in (listed["nccl-b"], listed["my_data"], other, *stay):
        assert os.path.lexists(path)


def test_a_directory_is_the_users_own_and_goes_with_its_job(temporary: Path) -> None:
    with leftovers.private_directory() as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert len(str(path / "socket")) < 108
    assert not list(temporary.iterdir())
