"""Ranks that are threads of one process: 64 ranks for a test on two cores, with no launcher.

The work is done by the native `LocalHub`; waiting releases the interpreter lock. A rank that raises
makes every blocked call of the others raise `RankFailed`, and ranks that wait for each other in a
circle, or for one that has ended, get `RankLost` at once with a list of who waits for what.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from pydist._loader import native
from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.transport import ReduceOp, Transport
from pydist.comm.transports.local.latency import Latency
from pydist.errors import RankFailed, RankLost

R = TypeVar("R")

_WORLD = 0


class LocalTransport(Transport):
    """One rank of a `LocalHub`; made by `run_local`, or alone for a single process."""

    name = "local"

    def __init__(
        self,
        hub: native.LocalHub | None = None,
        rank: int = 0,
        *,
        group: int = _WORLD,
        size: int | None = None,
        latency: Latency | None = None,
    ) -> None:
        """Join a hub.

        Args:
            hub: the meeting place of all ranks; None makes one for a single rank.
            rank: index of this rank in the group.
            group: the hub's number for the group.
            size: ranks in the group; those of the hub if None.
            latency: delays what is sent; the same object on all ranks of the hub.
        """
        self._hub = hub or native.LocalHub(1)
        self._group = group
        self.rank = rank
        self.size = size or self._hub.size
        self._latency = latency
        self._splits = 0
        self._collectives = 0
        # Buffers of collectives under way: another rank's thread may be writing into them.
        self._lent: dict[int, object] = {}

    def _subgroup(self, members: Sequence[int]) -> LocalTransport:
        self._splits += 1
        group = self._hub.subgroup(self._group, self._splits, list(members))
        return LocalTransport(
            self._hub,
            members.index(self.rank),
            group=group,
            size=len(members),
            latency=self._latency,
        )

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> LocalChannel:
        return LocalChannel(self._hub, self._group, self.rank, sends, recvs, tag, self._latency)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        if self._latency is not None:
            self._latency.send(self._group, self.rank, dest, tag)
        self._hub.send(self._group, self.rank, dest, tag, tensor.data_ptr(), tensor.nbytes)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        self._hub.receive(self._group, self.rank, source, tag, tensor.data_ptr(), tensor.nbytes)
        if self._latency is not None:
            self._latency.receive(self._group, self.rank, tag, [source])

    def _barrier(self) -> None:
        nothing: list[Tensor | None] = [None] * self.size
        self._exchange(nothing, nothing)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        inputs: list[Tensor | None] = [None] * self.size
        outputs: list[Tensor | None] = [None] * self.size
        if self.rank == root:
            inputs = [tensor] * self.size
            inputs[root] = None
        else:
            outputs[root] = tensor
        self._exchange(inputs, outputs)

    def _gather(self, tensor: Tensor, root: int) -> list[Tensor] | None:
        inputs: list[Tensor | None] = [None] * self.size
        inputs[root] = tensor
        if self.rank != root:
            self._exchange(inputs, [None] * self.size)
            return None
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        self._exchange(inputs, outputs)
        return outputs

    def _scatter(self, tensors: Sequence[Tensor] | None, out: Tensor, root: int) -> None:
        outputs: list[Tensor | None] = [None] * self.size
        outputs[root] = out
        self._exchange(tensors or [None] * self.size, outputs)

    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LocalWork:
        to, of = list[Tensor | None](inputs), list[Tensor | None](outputs)
        to[self.rank] = of[self.rank] = None
        return self._exchange_async(to, of)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        self._all_reduce_async(tensor, op).wait()

    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> LocalWork:
        number = self._join()
        ticket = self._hub.start_all_reduce(
            self._group, self.rank, tensor.data_ptr(), tensor.numel(), _name(tensor), op
        )
        return LocalWork(self, ticket, number, tensor)

    def _exchange(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
        self._exchange_async(inputs, outputs).wait()

    def _exchange_async(
        self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
    ) -> LocalWork:
        number = self._join()
        ticket = self._hub.start_exchange(
            self._group,
            self.rank,
            [_buffer(each) for each in inputs],
            [_buffer(each) for each in outputs],
        )
        return LocalWork(self, ticket, number, (inputs, outputs))

    def _join(self) -> int:
        """The number of the collective that this rank is about to start, alike on all ranks."""
        self._collectives += 1
        if self._latency is not None:
            self._latency.join(self._group, self._collectives)
        return self._collectives

    def abort(self, reason: str, exit_code: int) -> None:
        """Make every blocked or later call of the other ranks raise `RankFailed`, and return."""
        del exit_code  # the threads' process decides by the exception that `run_local` raises
        self._hub.abort(reason)


class LocalWork(Work):
    """A collective of the hub that is under way."""

    def __init__(
        self, transport: LocalTransport, ticket: int, number: int, buffers: object
    ) -> None:
        self._transport = transport
        self._ticket: int | None = ticket
        self._number = number
        transport._lent[ticket] = buffers

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._ticket is None:
            return
        ticket, self._ticket = self._ticket, None
        transport = self._transport
        transport._hub.finish(transport._group, transport.rank, ticket)
        del transport._lent[ticket]
        if transport._latency is not None:
            transport._latency.finish(transport._group, self._number, transport.size)


class LocalChannel(Channel):
    """One native call starts all messages, one collects them."""

    def __init__(
        self,
        hub: native.LocalHub,
        group: int,
        rank: int,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
        latency: Latency | None = None,
    ) -> None:
        self._buffers = (*sends, *recvs)  # keeps the memory that the native channel points to
        self._latency = latency
        self._group, self._rank, self._tag = group, rank, tag
        self._dests = [peer for peer, _ in sends]
        self._sources = [peer for peer, _ in recvs]
        self._native = native.LocalChannel(
            hub,
            group,
            rank,
            [(peer, each.data_ptr(), each.nbytes) for peer, each in sends],
            [(peer, each.data_ptr(), each.nbytes) for peer, each in recvs],
            tag,
        )

    def start(self) -> None:
        """See `Channel.start`."""
        if self._latency is not None:
            for dest in self._dests:
                self._latency.send(self._group, self._rank, dest, self._tag)
        self._native.start()

    def wait(self) -> None:
        """See `Channel.wait`."""
        self._native.wait()
        if self._latency is not None:
            self._latency.receive(self._group, self._rank, self._tag, self._sources)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _buffer(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)


def run_local(
    fn: Callable[..., R],
    size: int,
    *args: object,
    timeout: float = 60,
    latency: float = 0.0,
    **kwargs: object,
) -> list[R]:
    """Run a function on `size` ranks, each a thread of this process.

    Grad mode, inference mode and autocast of the caller hold in each rank. Random state is one a
    process: ranks that draw from it concurrently do not get reproducible numbers.

    Args:
        fn: called as fn(transport, *args, **kwargs) on every rank.
        size: number of ranks.
        *args: passed on, the same objects to all ranks.
        timeout: seconds after which blocked ranks are released and `RankLost` is raised.
        latency: seconds from sending to arrival, made by sleeping, to see what overlap hides.
        **kwargs: passed on.

    Returns:
        The results in rank order.

    Raises:
        BaseException: the first exception that a rank raised on its own account, with a note that
            names the rank.
        RankLost: a rank was still busy after `timeout`.
    """
    hub = native.LocalHub(size)
    delay = Latency(latency) if latency > 0 else None
    context = _Context()
    results: dict[int, R] = {}
    failures: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            with context.entered():
                results[rank] = fn(LocalTransport(hub, rank, latency=delay), *args, **kwargs)
        except BaseException as error:
            failures.append((rank, error))
            # While the exception is held its frames keep the buffers that others may be reading.
            hub.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            hub.leave(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads, timeout)
    except BaseException as error:
        hub.abort(f"{type(error).__name__}: {error}")
        raise
    if failures:
        raise _first_cause(failures)
    return [results[rank] for rank in range(size)]


def _join(threads: Sequence[threading.Thread], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    busy = [thread.name for thread in threads if thread.is_alive()]
    if busy:
        raise RankLost(f"after {timeout:g} s these ranks have not ended: {', '.join(busy)}")


def _first_cause(failures: Sequence[tuple[int, BaseException]]) -> BaseException:
    own = [pair for pair in failures if not isinstance(pair[1], RankFailed)]
    rank, error = (own or failures)[0]
    note = f"raised on rank {rank}"
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    return error


class _Context:
    """Thread-local modes of torch, which new threads do not inherit."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            if torch.cuda.is_available():
                # Backward nodes of all ranks would queue up on the device's one engine thread, and
                # one that waits there for another rank would never see it come.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            yield
