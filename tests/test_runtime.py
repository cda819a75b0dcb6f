"""Tests of `connect`: how it joins a job from each launcher's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pydist
from pydist.comm.transports.nccl import device_assignment as nccl_place
from pydist.errors import NotSupported, UsageError
from pydist.launch.backends import available
from pydist.runtime import connect
from support.jobs.children import run_python


def run(source: str, *launcher: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", source, folder=Path(__file__).parent, launcher=launcher, **variables)


def test_unknown_and_future_transports_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'smoke' is none of auto, mpi, c10d, local, .*nccl"):
        connect("smoke")


@pytest.mark.skipif(nccl_place.missing() == "", reason="there is a GPU")
def test_transports_of_devices_are_refused_where_there_is_none() -> None:
    for asked, tried in (("nccl", "nccl"), ("ipc", "ipc"), ("cuda", "nccl")):
        with pytest.raises(
            NotSupported, match=f"^transport '{tried}' carries device memory: torch"
        ):
            connect(asked)


@pytest.mark.parametrize(("name", "text"), [("PYDIST_HANG_LIMIT", "abc"), ("PYDIST_TUNE", "maybe")])
def test_a_wrong_variable_is_refused_on_one_rank_too(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name}={text}: possible are 0"):
        pydist.init(transport="local")


def test_local_is_one_rank_and_leaves_the_process_as_it_is() -> None:
    hook = sys.excepthook
    world = connect("local")
    assert (world.name, world.rank, world.size) == ("local", 0, 1)
    assert connect("local") is world
    assert sys.excepthook is hook


def test_alone_it_is_one_rank_of_torch_distributed() -> None:
    result = run(
        "from pydist.runtime import connect\n"
        "import torch.distributed as dist\n"
        "world = connect()\n"
        "print(world.rank, world.size, dist.get_world_size())\n"
        "import atexit; atexit.register(print, 'in good order')\n"
        "from pydist.errors import DataError\n"
        "raise DataError('a sample')\n"
    )
    assert result.stdout.splitlines() == ["0 1 1", "in good order"]
    assert result.stderr == "error: a sample\n"
    assert result.returncode == 65


def test_a_process_group_of_the_user_is_kept() -> None:
    result = run(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "group = dist.group.WORLD\n"
        "from pydist.runtime import connect\n"
        "connect()\n"
        "assert dist.group.WORLD is group\n"
    )
    assert result.returncode == 0, result.stderr


def test_a_process_group_of_the_user_may_be_of_devices_and_destroyed() -> None:
    result = run(
        "import torch, torch.distributed as dist\n"
        "dist.Backend.register_backend('devices', dist.ProcessGroupGloo, devices=['cuda'])\n"
        "dist.init_process_group('devices', store=dist.HashStore(), rank=0, world_size=1)\n"
        "from pydist.runtime import connect\n"
        "connect('c10d')._reduce(torch.ones(1), 'sum')\n"
        "dist.destroy_process_group()\n"
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_program_may_finalize_mpi() -> None:
    backend = {each.name: each for each in available()}.get("mpich")
    if backend is None:
        pytest.skip("MPICH is not installed")
    result = run(
        "from pydist.runtime import connect; connect('mpi')\n"
        "from mpi4py import MPI; MPI.Finalize()\n",
        MPI4PY_LIBMPI=backend.library or "",
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_an_mpi_that_is_not_the_launchers_is_named() -> None:
    """In this most common broken setup each rank believes that it is alone."""
    backends = {each.name: each for each in available() if each.library is not None}
    if len(backends) < 2:
        pytest.skip("needs two MPI libraries")
    # Open MPI's `mpirun` with MPICH's library.
    result = run(
        "from pydist.runtime import connect; connect()",
        OMPI_COMM_WORLD_RANK="0",
        OMPI_COMM_WORLD_SIZE="4",
        MPI4PY_LIBMPI=backends["mpich"].library or "",
    )
    assert "openmpi started 4 ranks, but the MPI library of mpi4py (MPICH" in result.stderr
    assert "sees 1: point MPI4PY_LIBMPI" in result.stderr


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_plain_mpirun_gets_the_library_that_fits(name: str, tmp_path: Path) -> None:
    """Two MPIs are installed, and no variable tells mpi4py which one started the job."""
    backend = {each.name: each for each in available()}.get(name)
    if backend is None:
        pytest.skip(f"{name} is not installed")
    source = (
        "import os; os.environ.pop('OMP_NUM_THREADS', None)\n"
        "from pydist.runtime import connect\n"
        "world = connect()\n"
        "import torch\n"
        "total = torch.ones(1); world.all_reduce(total)\n"
        "line = f'{world.name} {total.item()} {torch.get_num_threads()}\\n'\n"
        "import sys; sys.stdout.write(line)\n"
    )
    command = backend.command(2, [])
    variables = backend.variables(2, tmp_path)
    del variables["MPI4PY_LIBMPI"]
    result = run(source, *command, **variables)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert result.stdout.splitlines() == [f"mpi 2.0 {threads}"] * 2, result.stderr
