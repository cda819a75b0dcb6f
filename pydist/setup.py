"""init: joins the job, whoever launched it, and lays the mesh over its ranks."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pydist import memory
from pydist._loader import native
from pydist.backend import records
from pydist.comm.consensus import require_same
from pydist.launch import identity, watch
from pydist.mesh import Mesh, counts_of
from pydist.runtime import connect

_OF_A_RANK = frozenset(
    {"PYDIST_RANK", "PYDIST_STORE", "PYDIST_SUPERVISOR", "PYDIST_CACHE", "PYDIST_TRACEBACK"}
)
"""Variables that may differ between ranks: they change nothing that ranks exchange."""

_DRIVER = Path("/proc/driver/nvidia/version")


def init(
    data: int | None = None,
    spatial: Sequence[int] = (1, 1, 1),
    transport: str = "auto",
    seed: int = 0,
    keep_freed_memory: bool = True,
) -> Mesh:
    """Joins the job that this process is part of and lays a mesh over its ranks.

    Works under `mpirun`, `torchrun`, `pydist run`, and alone (one rank). From here on an exception
    on one rank ends all of them.

    Tells the C library's allocator to keep what a step frees for the next one, which takes page
    faults out of the step and leaves its peak resident; see `pydist.memory`.

    Args:
        data: number of sample groups (data parallelism); by default what the ranks allow.
        spatial: how often depth, height and width of every sample are split.
        transport: "auto", "host", "mpi", "c10d"; for tensors on CUDA devices "nccl" (one device a
            rank, which is what "auto" takes where it can), "ipc", "cuda-mpi" or "cuda"; see
            `pydist.runtime.connect`.
        seed: start of all random numbers that pydist draws (dropout, shuffling).
        keep_freed_memory: False leaves the allocator's settings alone and keeps the peak low, as
            PYDIST_KEEP_FREED_MEMORY=0 in the environment does.

    Returns:
        The mesh, with this rank's place in it.

    Raises:
        UsageError: a count is no whole number, the mesh does not fit the number of ranks that were
            started, or ranks differ in versions, mesh, seed or the environment variables of pydist,
            or one of these variables holds what it cannot.
        NotSupported: one for CUDA devices, and a rank has no GPU or not what carries its memory.
    """
    data, spatial, seed = counts_of(data, spatial, seed)
    watch.limit()  # checked where it is of no use too: a mistake is one on every number of ranks
    records.is_wanted()
    native.cpu_isa()
    if not (keep_freed_memory and memory.keep_freed_memory()):
        memory.allow_relief()
    if transport != "local" and identity.detect() is not None:
        # First where every rank is: ranks that ask for different transports join different ones.
        host = connect("host")
        require_same(host, _facts(host.size, transport, data, spatial, seed))
        world = connect(transport)
    else:
        world = connect(transport)
        require_same(world, _facts(world.size, transport, data, spatial, seed))
    if world.device is not None:
        require_same(world, _device_facts())
    native.set_num_threads(torch.get_num_threads())
    return Mesh(world, data, spatial, seed)


def _facts(
    size: int, transport: str, data: int | None, spatial: Sequence[int], seed: int
) -> dict[str, object]:
    """What has to be equal on all ranks from the start."""
    if data is None:
        data = size // max(1, math.prod(spatial))
    facts: dict[str, object] = {
        "the version of pydist": native.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
        "the MPI library": _mpi_library(),
        "the transport": transport,
        "the mesh (data × depth × height × width)": " × ".join(map(str, (data, *spatial))),
        "the seed": seed,
        "torch's default dtype": torch.get_default_dtype(),
    }
    # Under names of their own, so that one that is not set everywhere is named.
    for name in sorted(os.environ):
        if name.startswith("PYDIST_") and name not in _OF_A_RANK:
            facts[f"the environment variable {name}"] = os.environ[name]
    return facts


def _mpi_library() -> str:
    """Name, version and build of the MPI that connects the ranks, on one line."""
    if "pydist.comm.transports.mpi.transport" not in sys.modules:
        return "none"  # a program's own mpi4py says nothing of the ranks
    library: str = sys.modules["mpi4py.MPI"].Get_library_version()
    return " ".join(library.split("\0", maxsplit=1)[0].split())


def _device_facts() -> dict[str, object]:
    """What has to be equal where ranks compute on CUDA devices; NCCL is compared where it joins."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())
    except OSError:
        found = None
    return {
        "the version of CUDA": torch.version.cuda,
        "the version of cuDNN": torch.backends.cudnn.version(),
        "the version of the CUDA driver": found[0] if found else "unknown",
    }
