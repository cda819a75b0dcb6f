"""Implements the transport over MPI: mpi4py, persistent requests, host memory.

No library is linked: mpi4py finds the MPI of the launcher. MPI transfers data only inside of calls,
so messages in flight advance while some rank is inside a call of this transport: call `progress`
between long computations.
"""

from __future__ import annotations

import functools
import os
import time
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
    def __init__(self, comm: MPI.Comm | None = None, parent: MpiTransport | None = None) -> None:
        """Duplicates a communicator. Collective.

        Args:
            comm: the ranks of the group; all ranks of the job if None.
            parent: the transport that this one is a subgroup of; None for the whole job.
        """
        self._comm = (comm or MPI.COMM_WORLD).Dup()
        self._messages = self._comm.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._is_world = parent is None
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        # Buffered sends in flight: the requests, and the copy that they send with its lender.
        self._pending: deque[tuple[list[MPI.Request], Tensor, Tensor]] = deque()
        if parent is None:
            self._engine = ProgressEngine(partial(_poll, self._comm))
            # Of all groups of this process: the communicator of messages, and the sends in flight.
            self._groups = [(self._messages, self._pending)]
        else:
            self._engine, self._groups = parent._engine, parent._groups
            self._groups.append((self._messages, self._pending))
        self._sums = SliceSums(self._comm, self._engine)

    @waits("a new group")
    def _subgroup(self, members: Sequence[int]) -> MpiTransport:
        part = self._comm.Split(members[0], members.index(self.rank))
        try:
            return self._over(part)
        finally:
            part.Free()

    def _over(self, comm: MPI.Comm) -> MpiTransport:
        """Creates a transport of the same kind over another communicator."""
        return MpiTransport(comm, self)

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
        if MPI.Is_finalized():
            os._exit(exit_code)
        MPI.COMM_WORLD.Abort(exit_code)

    def close(self) -> None:
        """Frees the communicators; all ranks' also waits for buffered sends; see `Transport.close`.

        A program that has finalized MPI has freed everything.
        """
        if MPI.Is_finalized() or self._comm == MPI.COMM_NULL:
            return
        if self._is_world:
            self._finish_sends()
        self._messages.Free()
        self._comm.Free()

    def _finish_sends(self) -> None:
        """Waits until the buffered sends of all ranks have ended, in all groups. Collective.

        A send ends with its receive. So this rank, whose program has ended, receives what no call
        has received, such as messages of a stage before an exception.
        """
        finished: MPI.Request | None = None
        while finished is None or not finished.Test():
            for comm, _ in self._groups:
                _drop_messages(comm)
            pending = [requests for _, sends in self._groups for requests, *_ in sends]
            if finished is None and all(map(MPI.Request.Testall, pending)):
                finished = self._comm.Ibarrier()
            time.sleep(1e-3)


def _drop_messages(comm: MPI.Comm) -> None:
    """Receives all messages that have arrived, and drops them."""
    status = MPI.Status()
    while comm != MPI.COMM_NULL and (message := comm.Improbe(status=status)):
        message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])


def _poll(comm: MPI.Comm) -> None:
    # Any call drives all messages of the process. This one probes for a message that never comes,
    # so it has no effect and may run concurrently; on MPI_COMM_SELF, MPICH drives none.
    comm.Iprobe(MPI.ANY_SOURCE, _NEVER_SENT)
