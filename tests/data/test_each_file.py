"""Tests of work on all files by several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.data.each_file import for_each
from pydist.errors import DataError, DoesNotFit, UsageError
from support.data import tasks
from support.data.tasks import die, refuse_three, square
from support.jobs.children import child_environment, wait_until

SCRIPT = """
import sys
sys.path.append(sys.argv[2])
from pydist.data.each_file import for_each
from support.data.tasks import linger

if __name__ == "__main__":
    for _ in for_each(linger, [sys.argv[1]] * 2, 2):
        pass
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_results_of_all_tasks(workers: int) -> None:
    found = dict(for_each(square, range(5), workers))
    assert found == {n: n * n for n in range(5)}
    assert list(for_each(square, [], workers)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_ends_the_work(workers: int) -> None:
    with pytest.raises(DataError, match="three"):
        list(for_each(refuse_three, range(50), workers))


def test_a_process_that_dies() -> None:
    with pytest.raises(DoesNotFit, match="a worker process was ended"):
        list(for_each(die, range(3), 2))
    with pytest.raises(UsageError, match="workers=0: at least 1"):
        list(for_each(die, range(3), 0))


def test_a_script_that_workers_can_not_import(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('if __name__ == "__main__"', "if True"))
    command = [sys.executable, script, tmp_path / "pids", Path(tasks.__file__).parents[2]]
    done = subprocess.run(
        command, env=child_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    # A worker's own traceback may come after it.
    (line,) = [s for s in done.stderr.splitlines() if s.startswith("pydist.errors.UsageError: ")]
    assert "no worker process could begin: with workers=2" in line
    assert '`if __name__ == "__main__":`' in line


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script, trace = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    trace.touch()
    command = [sys.executable, script, trace, Path(tasks.__file__).parents[2]]
    parent = subprocess.Popen(command, env=child_environment(), text=True, cwd=tmp_path)
    wait_until(lambda: len(trace.read_text().split()) == 2, parent)
    parent.kill()
    parent.wait()
    pids = [int(pid) for pid in trace.read_text().split()]
    wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
