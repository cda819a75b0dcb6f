"""init: joins the job, whoever launched it, and lays the mesh over its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pydist._loader import native
from pydist.mesh import Mesh
from pydist.runtime import connect


def init(
    data: int | None = None,
    spatial: Sequence[int] = (1, 1, 1),
    transport: str = "auto",
    seed: int = 0,
) -> Mesh:
    """Joins the job that this process is part of and lays a mesh over its ranks.

    Works under `mpirun`, `torchrun`, `pydist run`, and alone (one rank). From here on an exception
    on one rank ends all of them.

    Args:
        data: number of sample groups (data parallelism); by default what the ranks allow.
        spatial: how often depth, height and width of every sample are split.
        transport: "auto", "mpi" or "c10d".
        seed: start of all random numbers that pydist draws (dropout, shuffling).

    Returns:
        The mesh, with this rank's place in it.

    Raises:
        UsageError: the mesh does not fit the number of ranks that were started.
    """
    world = connect(transport)
    native.set_num_threads(torch.get_num_threads())
    return Mesh(world, data, spatial, seed)
