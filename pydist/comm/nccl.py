"""The place of the NCCL transport, which carries device memory on a stream of its own."""

from __future__ import annotations

from pydist.errors import NotSupported


def make_nccl_transport() -> None:
    """Refuse.

    Raises:
        NotSupported: always; pydist's exchanges of device memory are not written yet.
    """
    raise NotSupported(
        "transport 'nccl' carries device memory, and this version of pydist computes on CPUs only;"
        " use 'mpi' or 'c10d'"
    )
