"""init: joins the job, whoever launched it, and lays the mesh over its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pydist import memory
from pydist._loader import native
from pydist.mesh import Mesh
from pydist.runtime import connect


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
        UsageError: the mesh does not fit the number of ranks that were started.
        NotSupported: one for CUDA devices, and a rank has no GPU or not what carries its memory.
    """
    if not (keep_freed_memory and memory.keep_freed_memory()):
        memory.allow_relief()
    world = connect(transport)
    native.set_num_threads(torch.get_num_threads())
    return Mesh(world, data, spatial, seed)
