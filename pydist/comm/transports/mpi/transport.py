"""Implements the transport over MPI: mpi4py, persistent requests, host memory.

No library is linked: mpi4py finds the MPI of the launcher. MPI transfers data only inside of calls,
so messages in flight advance while some rank is inside a call of this transport: call `progress`
between long computations, or from a thread (see the module `progress`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Concatenate, ParamSpec

import torch
from mpi4py import MPI
from torch import Tensor

from pydist.comm.interface.handles import Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.transports.host import HostTransport
from pydist.comm.transports.mpi.messages import (
    MpiChannel,
    MpiWork,
    elements_of,
    fits_one_message,
    parts_of,
)
from pydist.comm.transports.mpi.progress import ProgressEngine
from pydist.comm.transports.mpi.slice_sums import SliceSums, as_buffer
from pydist.errors import UsageError
from pydist.watchdog import waits

# Tags of a transport's own communicator; `SLICES` of slice_sums.py is another one.
_EXCHANGED, _NEVER_SENT = 0, 1

P = ParamSpec("P")

_MPI_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


def _fits(
    function: Callable[Concatenate[MpiTransport, P], None],
) -> Callable[Concatenate[MpiTransport, P], None]:
    """Decorates a collective: a message of another length belongs to another call."""

    @functools.wraps(function)
    def checked(self: MpiTransport, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(self, *args, **kwargs)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise self.ledger.misfit(self.rank, error) from error

    return checked


class MpiTransport(HostTransport):
    """Transport of one rank that belongs to an MPI communicator.

    Point-to-point messages and collectives use separate communicators: they can't match messages
    of other libraries, nor each other.
    """

    name = "mpi"

    @waits("a new group")
    def __init__(self, comm: MPI.Comm | None = None, engine: ProgressEngine | None = None) -> None:
        """Duplicates a communicator. Collective.

        Args:
            comm: the ranks of the group; all ranks of the job if None.
            engine: the progress engine of this process; a new one if None.
        """
        self._comm = (comm or MPI.COMM_WORLD).Dup()
        self._messages = self._comm.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._owns_engine = engine is None
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if engine is None:
            engine = ProgressEngine.from_environment(partial(_poll, self._comm), self.concurrent)
        self._engine = engine
        self._sums = SliceSums(self._comm, engine)
        # Buffered sends in flight: the requests and the copy that they send.
        self._pending: deque[tuple[list[MPI.Request], Tensor, Tensor]] = deque()

    @waits("a new group")
    def _subgroup(self, members: Sequence[int]) -> MpiTransport:
        part = self._comm.Split(members[0], members.index(self.rank))
        try:
            return self._over(part)
        finally:
            part.Free()

    def _over(self, comm: MPI.Comm) -> MpiTransport:
        """Creates a transport of the same kind over another communicator."""
        return MpiTransport(comm, self._engine)

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> MpiChannel:
        return MpiChannel(self._messages, self._engine, sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        self._free_sent()
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self._post(copy, copy, dest, tag)

    def _lend(self, tensor: Tensor, lender: Tensor, dest: int, tag: int) -> None:
        self._free_sent()
        self._post(tensor, lender, dest, tag)

    def _free_sent(self) -> None:
        """Frees messages that MPI has sent."""
        while self._pending and MPI.Request.Testall(self._pending[0][0]):
            self._pending.popleft()

    def _post(self, message: Tensor, lender: Tensor, dest: int, tag: int) -> None:
        """Sends a message, and keeps it and its lender until MPI has sent it."""
        requests = [self._messages.Isend(part, dest, tag) for part in parts_of(message)]
        self._pending.append((requests, message, lender))

    @waits("a message")
    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        status = MPI.Status()
        for part in parts_of(tensor):
            self._messages.Recv(part, source, tag, status)
            got, expected = status.Get_count(MPI.BYTE), part[0].nbytes
            if got != expected:  # MPI itself refuses longer messages only
                raise UsageError(
                    f"rank {self.rank} expects {expected} bytes from rank {source}, tag {tag}, and"
                    f" got {got}"
                )
        self._free_sent()

    @waits("a barrier")
    def _barrier(self) -> None:
        self._comm.Barrier()

    @_fits
    @waits("a broadcast")
    def _broadcast(self, tensor: Tensor, root: int) -> None:
        for part in parts_of(tensor):
            self._comm.Bcast(part, root)

    def _exchange_async(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> Work:
        requests = [
            self._comm.Irecv(part, peer, _EXCHANGED)
            for peer, each in recvs
            for part in parts_of(each)
        ]
        requests += [
            self._comm.Isend(part, peer, _EXCHANGED)
            for peer, each in sends
            for part in parts_of(each)
        ]
        return MpiWork(requests, self._engine, self.ledger, sends, recvs)

    @_fits
    @waits("an all-gather")
    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        if not fits_one_message(out):
            super()._all_gather(tensor, out)
        else:
            self._comm.Allgather(as_buffer(tensor), as_buffer(out))

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        if not fits_one_message(out):
            return super()._all_gather_async(tensor, parts, out)
        memory, kind = as_buffer(out)
        counts = [part.nbytes for part in parts]
        request = self._comm.Iallgatherv(MPI.IN_PLACE, [memory, counts, kind])
        return MpiWork([request], self._engine, self.ledger, counts, out)

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        return self._sums.start(parts, out, divisor)

    @_fits
    @waits("an all-reduce")
    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        for part in elements_of(tensor):
            self._comm.Allreduce(MPI.IN_PLACE, part, _MPI_OPS[op])

    def _reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        requests = [
            self._comm.Iallreduce(MPI.IN_PLACE, part, _MPI_OPS[op]) for part in elements_of(tensor)
        ]
        return MpiWork(requests, self._engine, self.ledger, tensor)

    def progress(self) -> None:
        """Advances messages of all transports of this process; see `Transport.progress`."""
        self._engine.progress()

    def abort(self, reason: str, exit_code: int) -> None:
        """Ends all processes of the job with `exit_code`."""
        del reason  # pydist.launch.failures has printed it
        MPI.COMM_WORLD.Abort(exit_code)

    def close(self) -> None:
        """Waits for buffered sends, then frees the communicators; see `Transport.close`."""
        if self._owns_engine:
            self._engine.close()
        for requests, _, _ in self._pending:
            MPI.Request.Waitall(requests)
        self._pending.clear()
        for comm in (self._messages, self._comm):
            if comm != MPI.COMM_NULL:
                comm.Free()


def _poll(comm: MPI.Comm) -> None:
    # Any call drives all messages of the process. This one probes for a message that never comes,
    # so it has no effect and may run concurrently; on MPI_COMM_SELF, MPICH drives none.
    comm.Iprobe(MPI.ANY_SOURCE, _NEVER_SENT)
