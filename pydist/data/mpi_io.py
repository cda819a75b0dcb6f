"""Reads HDF5 files by MPI-IO, where h5py is built with it.

Every process opens files for itself, as a communicator of one process: ranks open and close other
files, in another order, when a store keeps other blocks on each, and one rank's damaged file must
not block the others in a collective call. The reads go to the MPI library in one piece, with its
hints for the file system.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

from pydist.errors import UsageError


class MpiIo:
    """Driver of `ShardDataset` that reads HDF5 files by MPI-IO instead of system calls.

    Args:
        hints: for the MPI library, such as {"romio_ds_read": "disable"}.

    Raises:
        UsageError: h5py is built without MPI.
    """

    def __init__(self, hints: Mapping[str, str] | None = None) -> None:
        import h5py  # only where a file is read

        self.hints = dict(hints or {})
        if not h5py.get_config().mpi:
            raise UsageError(
                f"MPI-IO needs h5py built with the site's MPI, this h5py {h5py.__version__} is "
                "serial: CC=mpicc HDF5_MPI=ON pip install --no-binary=h5py h5py"
            )

    def __call__(self, path: Path) -> MpiIo:
        """Returns the access to a file; `ShardDataset` calls its driver for each."""
        return self

    def prepare(self, access: Any) -> None:
        """Selects MPI-IO in the property list with which a file is opened.

        Raises:
            UsageError: MPI does not allow calls in several threads.
        """
        from h5py import h5f
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError(
                "MPI-IO reads in a thread beside the one that trains, which this MPI does not "
                "allow (it lacks MPI_THREAD_MULTIPLE)"
            )
        access.set_fapl_mpio(MPI.COMM_SELF, MPI.Info.Create(self.hints))
        access.set_fclose_degree(h5f.CLOSE_STRONG)  # also while its arrays are referenced

    def opened(self, file: Any) -> None:
        """Is told an open file, which must be closed before MPI ends."""
        _closed_before_mpi_ends().add(file)

    def read(self, dataset: Any, window: tuple[slice, ...], out: Any) -> None:
        """Reads a part of a dataset into an array; MPI combines its rows to few large reads."""
        with dataset.collective:  # of one process
            dataset.read_direct(out, window)


@cache
def _closed_before_mpi_ends() -> WeakSet[Any]:
    """Returns the set of open files, which are closed at exit; made after MPI has started."""
    files = WeakSet[Any]()

    def close() -> None:
        for file in files:
            file.close()

    atexit.register(close)  # runs before mpi4py's own, which ends MPI
    return files
