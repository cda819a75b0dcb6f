"""init: joins the job, whoever launched it, and lays the mesh over its ranks."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Sequence

import torch

from pydist import memory
from pydist._loader import native
from pydist.comm import Transport
from pydist.comm.agree import require_same
from pydist.mesh import Mesh
from pydist.runtime import connect

_OF_A_RANK = frozenset(
    {"PYDIST_RANK", "PYDIST_STORE", "PYDIST_SUPERVISOR", "PYDIST_CACHE", "PYDIST_TRACEBACK"}
)
"""Variables that may differ between ranks: they change nothing that ranks exchange."""


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
        UsageError: the mesh does not fit the number of ranks that were started, or ranks differ in
            versions, mesh, seed or the environment variables of pydist.
        NotSupported: one for CUDA devices, and a rank has no GPU or not what carries its memory.
    """
    if not (keep_freed_memory and memory.keep_freed_memory()):
        memory.allow_relief()
    world = connect(transport)
    require_same(world, _facts(world, data, spatial, seed))
    native.set_num_threads(torch.get_num_threads())
    return Mesh(world, data, spatial, seed)


def _facts(
    world: Transport, data: int | None, spatial: Sequence[int], seed: int
) -> dict[str, object]:
    """What has to be equal on all ranks from the start."""
    if data is None:
        data = world.size // max(1, math.prod(spatial))
    mpi = sys.modules.get("mpi4py.MPI")
    facts: dict[str, object] = {
        "the version of pydist": native.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
        "the MPI library": mpi.Get_library_version().strip() if mpi is not None else "none",
        "the transport": world.name,
        "the mesh (data × depth × height × width)": " × ".join(map(str, (data, *spatial))),
        "the seed": seed,
        "torch's default dtype": torch.get_default_dtype(),
    }
    # Under names of their own, so that one that is not set everywhere is named.
    for name in sorted(os.environ):
        if name.startswith("PYDIST_") and name not in _OF_A_RANK:
            facts[f"the environment variable {name}"] = os.environ[name]
    return facts
