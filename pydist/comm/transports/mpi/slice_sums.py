"""Reduce-scatters over MPI's messages, in pieces that are summed while they lie in the cache.

A library's own reduce-scatter adds what it has received when all of it is there, and to divide the
sum takes another pass through memory. Measured on 2 ranks of one machine, gradients of CosmoFlow
(38 MB), with the division: 5.0 ms in pieces of 1 MB, 8.7 and 7.5 ms by MPI_Ireduce_scatter of Open
MPI 5 and MPICH 4; an all-reduce takes 8.3 ms.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from pydist.comm.interface.handles import Work
from pydist.comm.interface.reduction import WIDER, divide
from pydist.comm.transports.mpi.progress import ProgressEngine
from pydist.watchdog import waits

PIECE_BYTES = 1 << 20
"""Longest message: longer ones are no faster, and what is summed stays in the cache."""
_AHEAD = 2
"""Pieces that are received while one is summed."""
_WINDOW_BYTES = 8 << 20
"""Of all that is received ahead, from all peers: with many of them, pieces are smaller."""
SLICES = 2
"""The tag of their messages."""


class SliceSums:
    """The reduce-scatters of one communicator.

    Ranks start them in one order, and pieces travel in that order, whichever is waited for. All
    that others need of this rank is given to MPI at the start, out of the caller's memory. What is
    received moves on in `advance` and in waiting.
    """

    def __init__(self, comm: MPI.Comm, engine: ProgressEngine) -> None:
        """Sums of the ranks of `comm`, which is used with a tag of their own."""
        self.comm, self.engine = comm, engine
        self.rank = comm.Get_rank()
        size = comm.Get_size()
        # Each rank begins with the next one, so that none gets all messages first.
        self.peers = [(self.rank + step) % size for step in range(1, size)]
        piece = min(PIECE_BYTES, _WINDOW_BYTES // (_AHEAD * max(1, size - 1)))
        self._piece_bytes = max(piece, 4096) // 64 * 64
        self._idle: list[Tensor] = []  # of _AHEAD windows, [peers, piece]
        self._waiting: deque[SliceSum] = deque()  # with pieces that are not received yet
        self._receiving: deque[tuple[SliceSum, _Piece]] = deque()
        # The engine's thread may advance what the caller waits for.
        self._lock = threading.Lock()

    def start(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> SliceSum:
        """Starts one.

        Args:
            parts: of each rank's slice, what this rank has; none of it changes until `wait`.
            out: takes the sum of all ranks' parts of this rank's slice; apart from `parts`.
            divisor: the sum is divided by it.
        """
        with self._lock:
            work = SliceSum(self, parts, out, divisor, self._piece_bytes // out.element_size())
            if work.missing:
                self._waiting.append(work)
                self._receive()
        self.engine.started(self)
        return work

    def advance(self) -> None:
        """Sums what has arrived; does not wait."""
        if self._lock.acquire(blocking=False):
            try:
                while self._receiving and MPI.Request.Testall(self._receiving[0][1].requests):
                    self._sum()
            finally:
                self._lock.release()

    @waits("a reduce-scatter")
    def finish(self, work: SliceSum) -> None:
        """Waits for one of them."""
        with self._lock:
            while work.missing:
                MPI.Request.Waitall(self._receiving[0][1].requests)
                self._sum()
            MPI.Request.Waitall(work.sends)
        self.engine.ended(self)

    def _receive(self) -> None:
        """Asks for further pieces, as far as there is memory for them."""
        while self._waiting and len(self._receiving) < _AHEAD:
            work = self._waiting[0]
            window = self._idle.pop() if self._idle else self._new_window()
            self._receiving.append((work, _Piece(self, work, window)))
            if work.asked == len(work.out):
                self._waiting.popleft()

    def _new_window(self) -> Tensor:
        return torch.empty(len(self.peers), self._piece_bytes, dtype=torch.uint8)

    def _sum(self) -> None:
        """Takes the piece that has arrived."""
        work, piece = self._receiving.popleft()
        piece.add(work)
        self._idle.append(piece.window)
        self._receive()


class SliceSum(Work):
    """One reduce-scatter."""

    def __init__(
        self, sums: SliceSums, parts: Sequence[Tensor], out: Tensor, divisor: int, length: int
    ) -> None:
        """Sends this rank's parts off, in pieces of `length` elements."""
        self._sums: SliceSums | None = sums
        self.own, self.out, self.divisor, self.length = parts[sums.rank], out, divisor, length
        self.asked = 0
        """Elements that were asked for."""
        self.missing = len(out)
        """Elements whose sum is not there."""
        self.sends: list[MPI.Request] = [
            sums.comm.Isend(as_buffer(piece), peer, SLICES)
            for peer in sums.peers
            if len(parts[peer])
            for piece in parts[peer].split(length)
        ]
        self._parts = parts  # keeps the memory that is sent

    def done(self) -> bool:
        """See `Work.done`."""
        return self._sums is None or (not self.missing and MPI.Request.Testall(self.sends))

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._sums is not None:
            sums, self._sums = self._sums, None
            sums.finish(self)
            self._parts = ()
            del self.own


class _Piece:
    """A piece of a slice that is being received from all peers."""

    def __init__(self, sums: SliceSums, work: SliceSum, window: Tensor) -> None:
        self.window = window
        self.start = work.asked
        self.stop = work.asked = min(self.start + work.length, len(work.out))
        nbytes = (self.stop - self.start) * work.out.element_size()
        self._values: list[Tensor] = []  # in the order of ranks
        self.requests: list[MPI.Request] = []
        for row, peer in zip(window, sums.peers, strict=True):
            self._values.append(row[:nbytes].view(work.out.dtype))
            self.requests.append(sums.comm.Irecv(as_buffer(self._values[-1]), peer, SLICES))
        ranks = sorted(zip(sums.peers, self._values, strict=True), key=lambda each: each[0])
        self._values = [values for _, values in ranks]
        self._values.insert(sums.rank, work.own[self.start : self.stop])

    def add(self, work: SliceSum) -> None:
        """Sums the values in the order of ranks, in a wider dtype where theirs is narrow."""
        out = work.out[self.start : self.stop]
        dtype = WIDER.get(out.dtype, out.dtype)
        first, second, *others = self._values
        if out.dtype == dtype:
            total = torch.add(first, second, out=out)
        else:
            total = first.to(dtype).add_(second)
        for values in others:
            total += values
        divide(total, work.divisor)
        if total is not out:
            out.copy_(total)
        work.missing -= len(out)


def as_buffer(tensor: Tensor) -> tuple[MPI.buffer, MPI.Datatype]:
    """The bytes of a tensor, as MPI takes them."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE
