"""Messages of a size that MPI can count, their requests, and persistent requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.ledger import Ledger
from pydist.comm.transports.mpi.progress import ProgressEngine
from pydist.watchdog import waits

MAX_BYTES = 1 << 30
"""Longer messages are split: counts are C ints in MPI libraries older than MPI-4."""

_MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}


class MpiWork(Work):
    """Requests in flight, whose buffers the engine keeps until `wait`, even if it never comes."""

    def __init__(
        self,
        requests: list[MPI.Request],
        engine: ProgressEngine,
        ledger: Ledger,
        *buffers: object,
    ) -> None:
        self.ledger = ledger  # of the group, for the report of a hang
        self._pending: tuple[list[MPI.Request], object] | None = (requests, buffers)
        self._engine = engine
        engine.started()
        engine.works.add(self)

    def done(self) -> bool:
        """Returns whether all requests are complete; see `Work.done`."""
        return self._pending is None or MPI.Request.Testall(self._pending[0])

    @waits("messages")
    def wait(self) -> None:
        """Waits for all requests; see `Work.wait`."""
        if self._pending is None:
            return
        MPI.Request.Waitall(self._pending[0])
        self._pending = None
        self._engine.works.discard(self)
        self._engine.ended()


class MpiChannel(Channel):
    """Channel that uses persistent requests: MPI gets peers, buffers and tags once."""

    def __init__(
        self,
        comm: MPI.Comm,
        engine: ProgressEngine,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._buffers = (*sends, *recvs)  # keeps the memory that the requests point to
        self._engine = engine
        self._under_way = False
        self._requests: list[MPI.Prequest] = [
            comm.Recv_init(part, peer, tag) for peer, each in recvs for part in parts_of(each)
        ]
        self._requests += [
            comm.Send_init(part, peer, tag) for peer, each in sends for part in parts_of(each)
        ]

    def start(self) -> None:
        """Starts all requests of the channel; see `Channel.start`."""
        MPI.Prequest.Startall(self._requests)
        if self._requests and not self._under_way:
            self._under_way = True
            self._engine.started()

    @waits("messages")
    def wait(self) -> None:
        """Waits for all requests of the round; see `Channel.wait`."""
        MPI.Request.Waitall(self._requests)
        if self._under_way:
            self._under_way = False
            self._engine.ended()

    def close(self) -> None:
        """Frees the requests; see `Channel.close`."""
        requests, self._requests = self._requests, []
        for request in requests:
            request.Free()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # MPI may be unloaded at interpreter exit
            if not MPI.Is_finalized():
                self.close()


def fits_one_message(tensor: Tensor) -> bool:
    """Returns whether MPI can count the tensor's bytes."""
    return tensor.nbytes <= MAX_BYTES


def parts_of(tensor: Tensor) -> Iterator[tuple[MPI.buffer, MPI.Datatype]]:
    """Yields the bytes of a tensor as messages that MPI can count; at least one, maybe empty."""
    address, left = tensor.data_ptr(), tensor.nbytes
    while True:
        n = min(left, MAX_BYTES)
        yield MPI.buffer.fromaddress(address, n), MPI.BYTE
        address, left = address + n, left - n
        if not left:
            return


def _numbers(tensor: Tensor) -> tuple[MPI.buffer, MPI.Datatype]:
    """Returns the elements of a tensor as an MPI buffer with its datatype."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), _MPI_TYPES[tensor.dtype]


def elements_of(tensor: Tensor) -> Iterator[tuple[MPI.buffer, MPI.Datatype]]:
    """Yields the elements of a tensor in pieces that MPI can count."""
    for piece in tensor.view(-1).split(MAX_BYTES // tensor.element_size()):
        yield _numbers(piece)
