"""Loads the MPI library of the launcher that has started this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydist.errors import UsageError
from pydist.launch import backends
from pydist.launch.launcher_env import Identity

if TYPE_CHECKING:
    from mpi4py import MPI


def world_of(who: Identity | None) -> MPI.Intracomm:
    """Initializes MPI and returns the communicator of all ranks.

    Several MPI libraries may be installed: the launcher's is loaded, unless a variable names one.

    Args:
        who: this process's place in the job; None without a launcher.

    Raises:
        UsageError: there is no MPI library, or it does not see the launcher's ranks.
    """
    if who is not None and not {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & os.environ.keys():
        wheel = backends.find_wheel(who.launcher)
        if wheel is not None and wheel.library is not None:
            os.environ["MPI4PY_LIBMPI"] = wheel.library
    if who is not None:
        for variable, value in backends.yielding(who.launcher, who.local_size).items():
            os.environ.setdefault(variable, value)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"MPI needs mpi4py and an MPI library ({error}); pip install 'pydist[laptop]', or to "
            "train, start the ranks with torchrun"
        ) from error
    comm = MPI.COMM_WORLD
    if who is not None and who.launcher != "torchrun" and comm.Get_size() != who.size:
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
        raise UsageError(
            f"{who.launcher} started {who.size} ranks, but the MPI library of mpi4py ({library})"
            f" sees {comm.Get_size()}: point MPI4PY_LIBMPI to the launcher's library, or use"
            " `pydist run`"
        )
    return comm
