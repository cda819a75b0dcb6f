"""Ranks that are MPI processes: mpi4py, persistent requests, host memory.

No library is linked: mpi4py finds the MPI of the launcher. MPI moves nothing between calls, so a
message that is under way advances while some rank is inside a call of this transport.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from pydist.comm.handles import Channel, Work
from pydist.comm.host import HostTransport
from pydist.comm.transport import ReduceOp
from pydist.errors import UsageError

MAX_BYTES = 1 << 30
"""Longer messages are cut: counts are C ints in MPI libraries older than MPI-4."""

_MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}
_MPI_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class MpiTransport(HostTransport):
    """One rank of an MPI communicator.

    Point-to-point messages and collectives travel in communicators of their own: they can't meet
    those of other libraries, nor each other.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm | None = None) -> None:
        """Duplicate a communicator. Collective.

        Args:
            comm: the ranks of the group; all of the job if None.
        """
        self._comm = (comm or MPI.COMM_WORLD).Dup()
        self._messages = self._comm.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        # Buffered sends that MPI has not finished: the requests, and the copy that they send.
        self._pending: deque[tuple[list[MPI.Request], Tensor]] = deque()

    def _subgroup(self, members: Sequence[int]) -> MpiTransport:
        part = self._comm.Split(members[0], members.index(self.rank))
        try:
            return MpiTransport(part)
        finally:
            part.Free()

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> MpiChannel:
        return MpiChannel(self._messages, sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        while self._pending and MPI.Request.Testall(self._pending[0][0]):
            self._pending.popleft()
        copy = tensor.clone()
        requests = [self._messages.Isend(part, dest, tag) for part in _parts(copy)]
        self._pending.append((requests, copy))

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        status = MPI.Status()
        for part in _parts(tensor):
            self._messages.Recv(part, source, tag, status)
            got, expected = status.Get_count(MPI.BYTE), part[0].nbytes
            if got != expected:  # MPI itself refuses longer messages only
                raise UsageError(
                    f"rank {self.rank} expects {expected} bytes from rank {source}, tag {tag}, and"
                    f" got {got}"
                )

    def _barrier(self) -> None:
        self._comm.Barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        for part in _parts(tensor):
            self._comm.Bcast(part, root)

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> None:
        requests = [self._comm.Irecv(part, peer) for peer, each in recvs for part in _parts(each)]
        requests += [self._comm.Isend(part, peer) for peer, each in sends for part in _parts(each)]
        MPI.Request.Waitall(requests)

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        if out.nbytes > MAX_BYTES:
            super()._all_gather(tensor, out)
        else:
            self._comm.Allgather(_buffer(tensor), _buffer(out))

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        for part in _elements(tensor):
            self._comm.Allreduce(MPI.IN_PLACE, part, _MPI_OPS[op])

    def _reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        return MpiWork(
            [self._comm.Iallreduce(MPI.IN_PLACE, part, _MPI_OPS[op]) for part in _elements(tensor)],
            tensor,
        )

    def abort(self, reason: str, exit_code: int) -> None:
        """End all processes of the job with `exit_code`."""
        del reason  # pydist.launch.failures has printed it
        MPI.COMM_WORLD.Abort(exit_code)

    def close(self) -> None:
        """See `Transport.close`: waits for buffered sends, then frees the communicators."""
        for requests, _ in self._pending:
            MPI.Request.Waitall(requests)
        self._pending.clear()
        for comm in (self._messages, self._comm):
            if comm != MPI.COMM_NULL:
                comm.Free()


class MpiWork(Work):
    """Requests under way and the tensor that they fill."""

    def __init__(self, requests: list[MPI.Request], tensor: Tensor) -> None:
        self._requests = requests
        self._tensor = tensor

    def wait(self) -> None:
        """See `Work.wait`."""
        MPI.Request.Waitall(self._requests)
        self._requests = []


class MpiChannel(Channel):
    """Persistent requests: peers, buffers and tags are given to MPI once."""

    def __init__(
        self,
        comm: MPI.Comm,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._buffers = (*sends, *recvs)  # keeps the memory that the requests point to
        self._requests: list[MPI.Prequest] = [
            comm.Recv_init(part, peer, tag) for peer, each in recvs for part in _parts(each)
        ]
        self._requests += [
            comm.Send_init(part, peer, tag) for peer, each in sends for part in _parts(each)
        ]

    def start(self) -> None:
        """See `Channel.start`."""
        MPI.Prequest.Startall(self._requests)

    def wait(self) -> None:
        """See `Channel.wait`."""
        MPI.Request.Waitall(self._requests)

    def close(self) -> None:
        """See `Channel.close`."""
        requests, self._requests = self._requests, []
        for request in requests:
            request.Free()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # an interpreter that ends may have no MPI any more
            if not MPI.Is_finalized():
                self.close()


def _buffer(tensor: Tensor) -> tuple[MPI.buffer, MPI.Datatype]:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE


def _parts(tensor: Tensor) -> Iterator[tuple[MPI.buffer, MPI.Datatype]]:
    """The bytes of a tensor as messages that MPI can count; at least one, maybe empty."""
    address, left = tensor.data_ptr(), tensor.nbytes
    while True:
        n = min(left, MAX_BYTES)
        yield MPI.buffer.fromaddress(address, n), MPI.BYTE
        address, left = address + n, left - n
        if not left:
            return


def _elements(tensor: Tensor) -> Iterator[tuple[MPI.buffer, MPI.Datatype]]:
    """The elements of a tensor in pieces that MPI can count."""
    for piece in tensor.view(-1).split(MAX_BYTES // tensor.element_size()):
        yield MPI.buffer.fromaddress(piece.data_ptr(), piece.nbytes), _MPI_TYPES[tensor.dtype]
