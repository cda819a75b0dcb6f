"""Implements the transport over torch.distributed (gloo), for `torchrun` and hosts without MPI."""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.ledger import Ledger
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.transports.host import HostTransport
from pydist.errors import RankLost, UsageError
from pydist.watchdog import ended_ranks, waits

_INTERNAL_TAG = 1 << 15  # above all user tags
_CLOSING = "pydist: ranks that close"
_NEVER = timedelta(days=24)  # milliseconds in 32 bits; the watchdog knows which ranks hang
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


P = ParamSpec("P")
R = TypeVar("R")

_BROKEN = re.compile(r"gloo.*(Connection (closed|reset) by peer|Broken pipe|Socket closed)", re.S)


class _HasLedger(Protocol):
    """Object that waits for messages: a transport, a channel, or work in flight."""

    @property
    def ledger(self) -> Ledger: ...


W = TypeVar("W", bound=_HasLedger)


def _names_lost(
    doing: str,
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Returns a decorator that names the ended rank when a connection breaks.

    Args:
        doing: what this rank does with other ranks, as in "this rank waits for a message".
    """

    def decorate(function: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(function)
        def checked(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(self, *args, **kwargs)
            except RuntimeError as error:
                if not _BROKEN.search(str(error)):
                    raise
                ended = ", ".join(f"rank {rank}" for rank in ended_ranks()) or "another rank"
                calls = self.ledger.last_calls(2)
                raise RankLost(
                    f"{ended} ended while this rank {doing}"
                    + (f"; the last calls of this rank: {calls}" if calls else "")
                ) from error

        return checked

    return decorate


def _waits(name: str) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Returns the decorators `pydist.watchdog.waits` and `_names_lost` as one."""

    def decorate(function: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        return _names_lost(f"waits for {name}")(waits(name)(function))

    return decorate


class _BufferedSends:
    """Buffered sends of all groups of this process, each kept until it has been sent.

    torch learns only in `wait` that gloo has sent a message: a thread waits for each in turn.
    """

    def __init__(self) -> None:
        self.pending: deque[tuple[dist.Work, Tensor, Tensor]] = deque()
        self._posted = threading.Semaphore(0)
        threading.Thread(target=self._free, name="pydist sends", daemon=True).start()

    def add(self, work: dist.Work, message: Tensor, lender: Tensor) -> None:
        """Keeps a message and its lender until it has been sent."""
        self.pending.append((work, message, lender))
        self._posted.release()

    def _free(self) -> None:
        while self._posted.acquire():
            with suppress(RuntimeError):  # its receiver has ended
                self.pending[0][0].wait()
            self.pending.popleft()

    def abandon(self) -> None:
        """Frees messages that no rank receives. Breaks connections.

        The interpreter crashes if it ends during the thread's wait.
        """
        while self.pending:
            with suppress(RuntimeError, IndexError):  # broken; freed by the thread
                self.pending[0][0].wait(timedelta(milliseconds=1))


class C10dTransport(HostTransport):
    """Transport of one rank that belongs to a gloo process group."""

    name = "c10d"
    concurrent = True

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        order: Sequence[int] | None = None,
        sends: _BufferedSends | None = None,
    ) -> None:
        """Wraps a process group.

        Args:
            group: the ranks of the transport. None makes a group of all ranks, as the default group
                may be the program's: with a timeout, or without a backend for host tensors.
            order: the group's ranks in the order of the transport; None keeps their order.
            sends: the buffered sends of this process; None for a new object.
        """
        self._group = group or _new_group()
        self.size = dist.get_world_size(self._group)
        self._order = list(order) if order is not None else list(range(self.size))
        self.rank = self._order.index(dist.get_rank(self._group))
        self._owns_sends = sends is None
        self._sends = sends or _BufferedSends()
        self._store = dist.distributed_c10d._get_default_store()
        # Keeps buffers alive: bytes of other ranks arrive even if no one waits.
        self._under_way: set[_C10dWork] = set()
        # gloo can't send to its own rank: tag -> messages of this rank to itself.
        self._own: dict[int, deque[Tensor]] = defaultdict(deque)
        self._is_closed = False

    @_waits("a new group")
    def _subgroup(self, members: Sequence[int]) -> C10dTransport:
        ranks = [dist.get_global_rank(self._group, self._order[member]) for member in members]
        # torch sorts the ranks of a new group.
        order = [sorted(ranks).index(rank) for rank in ranks]
        group = _new_group(ranks)
        return C10dTransport(group, order, self._sends)

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> C10dChannel:
        return C10dChannel(self, sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self._post(copy, copy, dest, tag)

    def _lend(self, tensor: Tensor, lender: Tensor, dest: int, tag: int) -> None:
        self._post(tensor, lender, dest, tag)

    def _post(self, message: Tensor, lender: Tensor, dest: int, tag: int) -> None:
        """Sends a message, and keeps it and its lender until it has been sent."""
        if dest == self.rank:
            self._own[tag].append(message)
        elif message.numel():
            # The thread that waits would end the profiler's record of the call: if the profiler
            # stops meanwhile, torch crashes.
            torch._C._autograd._enable_record_function(False)
            try:
                work = self._isend(message, dest, tag)
            finally:
                torch._C._autograd._enable_record_function(True)
            self._sends.add(work, message, lender)

    @_waits("a message")
    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        if source == self.rank:
            if not self._own[tag]:
                raise UsageError(f"rank {source} waits for a message with tag {tag} from itself")
            tensor.view(-1).copy_(self._own[tag].popleft().view(-1))
        elif tensor.numel():
            self._irecv(tensor, source, tag).wait()

    @_names_lost("sends a message")
    def _isend(self, tensor: Tensor, dest: int, tag: int) -> dist.Work:
        work = dist.isend(_bytes(tensor), group=self._group, group_dst=self._order[dest], tag=tag)
        assert work is not None
        return work

    @_names_lost("is to receive a message")
    def _irecv(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        work = dist.irecv(_bytes(tensor), group=self._group, group_src=self._order[source], tag=tag)
        assert work is not None
        return work

    @_waits("a barrier")
    def _barrier(self) -> None:
        dist.barrier(self._group)

    @_waits("a broadcast")
    def _broadcast(self, tensor: Tensor, root: int) -> None:
        if tensor.numel():
            dist.broadcast(_bytes(tensor), group=self._group, group_src=self._order[root])

    def _exchange_async(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> Work:
        works = [self._irecv(each, peer, _INTERNAL_TAG) for peer, each in recvs if each.numel()]
        works += [self._isend(each, peer, _INTERNAL_TAG) for peer, each in sends if each.numel()]
        return _C10dWork(self, works, [each for _, each in (*sends, *recvs)])

    @_waits("an all-reduce")
    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        dist.all_reduce(tensor, _OPS[op], group=self._group)

    @_names_lost("starts an all-reduce")
    def _reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        work = dist.all_reduce(tensor, _OPS[op], group=self._group, async_op=True)
        assert work is not None
        return _C10dWork(self, [work], [tensor])

    def abort(self, reason: str, exit_code: int) -> None:
        """Ends this process; the launcher and the broken connections end the others."""
        del reason  # pydist.launch.failures has printed it
        os._exit(exit_code)

    def close(self) -> None:
        """Waits for buffered sends of all groups, until all ranks close; see `Transport.close`.

        A send ends with its receive, and what a stage has sent before an exception may have none.
        """
        if self._is_closed or not self._owns_sends:
            return
        self._is_closed = True
        with suppress(RuntimeError):  # the rank that has the store has ended: all were closing
            self._store.add(_CLOSING, 1)
            while self._sends.pending and self._store.add(_CLOSING, 0) < self.size:
                time.sleep(5e-3)
        self._sends.abandon()


class _C10dWork(Work):
    def __init__(
        self, transport: C10dTransport, works: Sequence[dist.Work], tensors: Sequence[Tensor]
    ) -> None:
        self._works, self._tensors = works, tensors
        self._under_way, self.ledger = transport._under_way, transport.ledger
        self._under_way.add(self)

    def done(self) -> bool:
        # torch learns only in `wait` that a message has arrived, unlike a collective.
        return all(work.is_completed() for work in self._works)

    @_waits("messages")
    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []
        self._under_way.discard(self)


class C10dChannel(Channel):
    """Channel that posts new messages in each round, as gloo has no persistent ones."""

    def __init__(
        self,
        transport: C10dTransport,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._transport = transport
        self._sends, self._recvs, self._tag = sends, recvs, tag
        self._works: list[dist.Work] = []
        self.ledger = transport.ledger

    def start(self) -> None:
        """Starts the round's receives, then its sends; see `Channel.start`."""
        transport = self._transport
        for source, each in self._recvs:
            if source != transport.rank and each.numel():
                self._works.append(transport._irecv(each, source, self._tag))
        for dest, each in self._sends:
            if dest == transport.rank:
                transport._own[self._tag].append(each.clone())
            elif each.numel():
                self._works.append(transport._isend(each, dest, self._tag))

    @_waits("messages")
    def wait(self) -> None:
        """Waits until the round's messages have arrived; see `Channel.wait`."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        for source, each in self._recvs:
            if source == self._transport.rank:
                self._transport._recv(each, source, self._tag)


def _new_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Makes a gloo group of these ranks, which all call this; by default of all ranks."""
    group = dist.new_group(
        ranks, _NEVER, backend="gloo", use_local_synchronization=ranks is not None
    )
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


def _bytes(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor as bytes: gloo does not support all dtypes."""
    return tensor.detach().view(-1).view(torch.uint8)
