"""Tests that children of a rank end as without pydist and join no job, which goes on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pydist.launch.backends import available
from support.jobs.children import run_python

SCRIPT = """
import atexit, os, sys, time
import torch
import pydist

say = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one call
child = None
atexit.register(lambda: say("left by", child or "the rank"))
mesh = pydist.init(spatial=(2, 1, 1))
for number, end in enumerate({ends}):
    forked = os.fork()
    if forked == 0:
        child = f"fork {{number}}"
        say("in", child)
        exec(end)
        sys.exit(0)
    _, status = os.waitpid(forked, 0)
    say("ended", number, os.waitstatus_to_exitcode(status))
mesh.world.barrier()

t = pydist.distribute_tensor(torch.arange(8.0).reshape(1, 1, 8, 1, 1) + 1, mesh)
model, x = pydist.parallelize(torch.nn.Conv3d(1, 1, 3, padding=1), mesh), torch.ones(1, 1, 8, 4, 4)
for use in {uses}:
    forked = os.fork()
    if forked == 0:
        child = use
        exec(use)
        sys.exit(0)
    if mesh.rank == 1:
        time.sleep(0.2)
    for factor in (1, 2, 3):
        assert (t * factor).sum() == 36 * factor, use
    _, status = os.waitpid(forked, 0)
    say("taking part ended", os.waitstatus_to_exitcode(status))
say("went on")
"""

CHILDREN = """
import multiprocessing, subprocess, sys
import pydist

mesh = pydist.init(spatial=(2, 1, 1))
if __name__ == "__main__":
    worker = multiprocessing.get_context(["spawn", "forkserver"][mesh.rank]).Process(target=print)
    worker.start()
    worker.join()
    assert worker.exitcode == 1
    program = [sys.executable, "-c", "import pydist; print(pydist.init().size)"]
    assert subprocess.run(program).returncode == 1
    script = __file__.replace("script", "own")
    with open(script, "w") as file:
        file.write("import pydist; assert pydist.init().size == 1")
    if mesh.rank == 0:
        subprocess.run([sys.executable, "-m", "pydist.launch", "1", "gloo", script], check=True)
    mesh.world.barrier()
"""

SPAWNED = """
import os, socket
import torch.multiprocessing as mp
import pydist

def work(rank, port):
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in of_rank.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    assert pydist.init(spatial=(2, 1, 1)).size == 2

if __name__ == "__main__":
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    mp.spawn(work, (port,), nprocs=2)
"""

ENDS = {
    "pass": 0,
    "sys.exit(3)": 3,
    "sys.exit('bye')": 1,
    "raise ValueError('of the fork')": 1,
    "os._exit(4)": 4,
}
# Only where the launcher's worker runs the program; otherwise the interpreter hides this code.
OF_WORKERS = {"raise SystemExit(5)": 5}

USES = {
    "barrier": "mesh.world.barrier()",
    "loss": "print((t * 1000).sum())",
    "whole": "t.full_tensor()",
    "init": "pydist.init(spatial=(2, 1, 1))",
    "training": "model(x).sum().backward()",
}

LAUNCHERS = ("openmpi", "mpich", "gloo", "torchrun")


def run(folder: Path, launcher: str, source: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(source)
    command = ["-m", "pydist.launch", "2", launcher, str(script)]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    elif launcher not in [each.name for each in available()]:
        pytest.skip(f"{launcher} is not installed")
    return run_python(*command, folder=folder, seconds=120, PYDIST_HANG_LIMIT="20")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_forks_end_take_no_part_and_the_job_goes_on(tmp_path: Path, launcher: str) -> None:
    ends = ENDS if launcher == "torchrun" else ENDS | OF_WORKERS
    result = run(tmp_path, launcher, SCRIPT.format(ends=list(ends), uses=list(USES.values())))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines.count("went on") == lines.count("left by the rank") == 2
    for number, (end, code) in enumerate(ends.items()):
        assert lines.count(f"in fork {number}") == 2
        assert lines.count(f"ended {number} {code}") == 2, result.stdout
        assert lines.count(f"left by fork {number}") == (0 if "_exit" in end else 2)
    # torchrun's ranks write their errors in pieces, which can mix.
    assert result.stderr.count("ValueError") == result.stderr.count("of the fork") == 2
    assert result.stderr.count("bye") == 2
    assert lines.count("taking part ended 1") == 2 * len(USES)
    for rank in range(2):
        said = f"is a fork of rank {rank}, and no rank: it can't take part"
        assert result.stderr.count(said) == len(USES)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_children_are_no_ranks_unless_a_launcher_starts_them(
    tmp_path: Path, launcher: str
) -> None:
    result = run(tmp_path, launcher, CHILDREN)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert result.stderr.count(f"is a child of rank {rank}, and no rank") == 2, result.stderr


def test_ranks_that_a_program_spawns_join(tmp_path: Path) -> None:
    """It has not joined itself, so its children are the ranks."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    result = run_python(str(script), folder=tmp_path, seconds=120, PYDIST_HANG_LIMIT="20")
    assert result.returncode == 0, result.stderr
