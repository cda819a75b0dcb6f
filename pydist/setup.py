"""`init`, which joins the job under any launcher and makes the mesh of its ranks."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pydist import memory
from pydist._loader import native
from pydist.backend import records
from pydist.comm import Transport
from pydist.comm.consensus import require_same, together
from pydist.errors import UsageError
from pydist.grid import AXES, OTHER_AXES, SPATIAL_AXES, Grid
from pydist.launch import launcher_env, watch
from pydist.mesh import Mesh, counts_along, counts_of
from pydist.runtime import connect

_OF_A_RANK = frozenset(
    {
        *("PYDIST_RANK", "PYDIST_STORE", "PYDIST_SUPERVISOR", "PYDIST_CACHE", "PYDIST_TRACEBACK"),
        *("PYDIST_PACKS_SERVERS", "PYDIST_PACKS_SECRET", "PYDIST_JOINED"),
        *("PYDIST_MOUNT", "PYDIST_MOUNT_PACKS", "PYDIST_MOUNT_OUTPUT", "PYDIST_MOUNT_LARGE"),
        *("PYDIST_MOUNT_FOLDERS", "PYDIST_MOUNT_PROFILE", "PYDIST_MOUNT_CACHE"),
        *("PYDIST_MOUNT_SERVERS", "PYDIST_MOUNT_SECRET"),
    }
)
"""Variables that may differ between ranks, as they do not affect exchanges."""

_DRIVER = Path("/proc/driver/nvidia/version")


def init(
    data: int | None = None,
    spatial: Sequence[int] = (1, 1, 1),
    transport: str = "auto",
    seed: int = 0,
    keep_freed_memory: bool = True,
    shares: Mapping[str, Sequence[float]] | None = None,
    mesh: Callable[[int], Grid] | None = None,
    **axes: int,
) -> Mesh:
    """Joins the job that this process is part of and makes a mesh of its ranks.

    Works under `mpirun`, `torchrun`, `pydist run`, and alone (one rank). From here on, an exception
    on one rank ends all of them.

    Sets the C library's allocator to keep the memory that a step frees for the next step. This
    avoids page faults and leaves the peak resident; see `pydist.memory`.

    Args:
        data: number of sample groups (data parallelism); by default as many as the ranks allow.
        spatial: numbers of parts of every sample's depth, height and width.
        transport: "auto", "host", "mpi", "c10d"; for tensors on CUDA devices "nccl" (one device per
            rank, which "auto" uses if possible), "ipc", "cuda-mpi" or "cuda"; "staged" for ranks
            with and without a device; see `pydist.runtime.connect`.
        seed: seed of all random numbers that pydist draws (dropout, shuffling).
        keep_freed_memory: False leaves the allocator's settings unchanged and keeps the peak low,
            like PYDIST_KEEP_FREED_MEMORY=0 in the environment.
        shares: the parts of an axis in proportion, for ranks of unequal speed, such as
            {"depth": (2, 1)}; of "data" the samples of a `Loader`'s batch for each group.
        mesh: returns the mesh for a number of ranks, instead of `data`, `spatial` and `axes`; see
            `pydist.plan.best_mesh`. Rank 0 calls it, and all ranks take its answer.
        **axes: numbers of parts along `pydist.grid.OTHER_AXES`: ``channel=2`` divides the layers'
            channels.

    Returns:
        The mesh, with this rank's position.

    Raises:
        UsageError: an axis does not exist, a count is not whole, the mesh does not fit the number
            of ranks or is given twice, ranks differ in versions, mesh, seed or the environment
            variables of pydist, or one of these variables has an invalid value.
        NotSupported: the transport is for CUDA devices, and a rank has no GPU or can't send its
            memory.
    """
    data, spatial, seed = counts_of(data, spatial, seed)
    others = counts_along(axes)
    of_sample = (*(others.get(axis, 1) for axis in OTHER_AXES), *spatial)

    if mesh is not None and (data is not None or set(of_sample) != {1}):
        raise UsageError(
            "init(mesh=...) chooses the numbers of parts: leave out data, spatial and "
            f"{', '.join(OTHER_AXES)}, or mesh"
        )

    def facts(size: int) -> dict[str, object]:
        groups = size // max(1, math.prod(of_sample)) if data is None else data
        sizes = " × ".join(map(str, (groups, *of_sample)))
        return {
            f"the mesh ({' × '.join(AXES)})": sizes if mesh is None else "as rank 0 chooses",
            "the argument shares": repr(shares),
            "the seed": seed,
        }

    world = join(transport, facts, keep_freed_memory)
    if mesh is not None:
        data, spatial, others = chosen_by_rank_0(world, mesh)
    return Mesh(world, data, spatial, seed, axes=others, shares=shares)


def chosen_by_rank_0(
    world: Transport, choose: Callable[[int], Grid]
) -> tuple[int, Sequence[int], dict[str, int]]:
    """Returns the parts of data, of the spatial dims and of other axes of a mesh. Collective.

    Args:
        world: the ranks.
        choose: returns the mesh for their number; called on rank 0 alone.
    """
    shape: Sequence[int] = ()
    with together(world, "choosing the mesh"):
        if world.rank == 0:
            shape = choose(world.size).shape
    sizes = dict(zip(AXES, world.broadcast_json(shape), strict=True))
    spatial = [sizes[axis] for axis in SPATIAL_AXES]
    return sizes["data"], spatial, {axis: sizes[axis] for axis in OTHER_AXES}


def join(
    transport: str, facts: Callable[[int], Mapping[str, object]], keep_freed_memory: bool
) -> Transport:
    """Joins the job that this process is part of, for `init` and its relatives.

    Args:
        transport: as of `init`.
        facts: returns what must be equal on all ranks, of a number of ranks.
        keep_freed_memory: as of `init`.

    Returns:
        The transport over all ranks.

    Raises:
        UsageError: ranks differ in versions, facts or the environment variables of pydist, or one
            of these variables has an invalid value.
        NotSupported: as of `init`.
    """
    watch.limit()  # validates the variable on any number of ranks, also where it is not used
    records.is_wanted()
    native.cpu_isa()
    if not (keep_freed_memory and memory.keep_freed_memory()):
        memory.allow_relief()
    if transport != "local" and launcher_env.detect() is not None:
        # First on the host, which all ranks join: different transports join different ranks.
        host = connect("host")
        require_same(host, {**_facts(transport), **facts(host.size)})
        world = connect(transport)
    else:
        world = connect(transport)
        require_same(world, {**_facts(transport), **facts(world.size)})
    if world.device is not None and not world.mixes:
        require_same(world, _device_facts())
    native.set_num_threads(torch.get_num_threads())
    return world


def _facts(transport: str) -> dict[str, object]:
    """Returns the facts that must be equal on all ranks from the start."""
    facts: dict[str, object] = {
        "the version of pydist": native.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
        "the MPI library": _mpi_library(),
        "the transport": transport,
        "torch's default dtype": torch.get_default_dtype(),
    }
    # One fact per variable, so that the error names one that is not set everywhere.
    for name in sorted(os.environ):
        if name.startswith("PYDIST_") and name not in _OF_A_RANK:
            facts[f"the environment variable {name}"] = os.environ[name]
    return facts


def _mpi_library() -> str:
    """Returns name, version and build of the MPI that connects the ranks, on one line."""
    if "pydist.comm.transports.mpi.transport" not in sys.modules:
        return "none"  # a program's own mpi4py does not connect the ranks
    library: str = sys.modules["mpi4py.MPI"].Get_library_version()
    return " ".join(library.split("\0", maxsplit=1)[0].split())


def _device_facts() -> dict[str, object]:
    """Returns the facts that must be equal on CUDA devices; NCCL is compared where it joins."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())
    except OSError:
        found = None
    return {
        "the version of CUDA": torch.version.cuda,
        "the version of cuDNN": torch.backends.cudnn.version(),
        "the version of the CUDA driver": found[0] if found else "unknown",
    }
