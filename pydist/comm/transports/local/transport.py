"""Implements the transport between threads of one process, which needs no launcher.

The native `LocalHub` does the work; waiting releases the interpreter lock. If a rank raises, every
blocked call of the others raises `RankFailed`. Ranks that wait for each other in a cycle, or for a
rank that has ended, immediately get `RankLost` with a list of the ranks and what they wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pydist._loader import native
from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport

_WORLD = 0


class LocalTransport(Transport):
    """Transport of one rank that `run_local` makes, or a single process for itself."""

    name = "local"

    def __init__(
        self,
        hub: native.LocalHub | None = None,
        rank: int = 0,
        *,
        group: int = _WORLD,
        size: int | None = None,
        lent: dict[tuple[int, int, int], object] | None = None,
    ) -> None:
        """Joins a hub.

        Args:
            hub: the hub of all ranks; None makes one for a single rank.
            rank: index of this rank in the group.
            group: the hub's number for the group.
            size: number of ranks in the group; all of the hub if None.
            lent: buffers of collectives in flight, by group, rank and ticket; the same object on
                all ranks of the hub.
        """
        self._hub = hub or native.LocalHub(1)
        self._group = group
        self.rank = rank
        self.size = size or self._hub.size
        self._splits = 0
        # The last rank to join a collective copies into the buffers of all ranks. So the buffers
        # must outlive the `Work`, and a rank whose thread has ended meanwhile.
        self._lent = {} if lent is None else lent

    def _subgroup(self, members: Sequence[int]) -> LocalTransport:
        self._splits += 1
        group = self._hub.subgroup(self._group, self._splits, list(members))
        return LocalTransport(
            self._hub,
            members.index(self.rank),
            group=group,
            size=len(members),
            lent=self._lent,
        )

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        return LocalChannel(self._hub, self._group, self.rank, sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        tensor = tensor.contiguous()
        self._hub.send(self._group, self.rank, dest, tag, tensor.data_ptr(), tensor.nbytes)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        self._hub.receive(self._group, self.rank, source, tag, tensor.data_ptr(), tensor.nbytes)

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

    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        to, of = list[Tensor | None](inputs), list[Tensor | None](outputs)
        to[self.rank] = of[self.rank] = None
        return self._exchange_async(to, of)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        self._all_reduce_async(tensor, op).wait()

    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        ticket = self._hub.start_all_reduce(
            self._group, self.rank, tensor.data_ptr(), tensor.numel(), _name(tensor), op
        )
        return LocalWork(self, ticket, tensor)

    def _exchange(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
        self._exchange_async(inputs, outputs).wait()

    def _exchange_async(
        self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
    ) -> Work:
        ticket = self._hub.start_exchange(
            self._group,
            self.rank,
            [_buffer(each) for each in inputs],
            [_buffer(each) for each in outputs],
        )
        return LocalWork(self, ticket, (inputs, outputs))

    def abort(self, reason: str, exit_code: int) -> None:
        """Makes every blocked or later call of the other ranks raise `RankFailed`, and returns."""
        del exit_code  # the exception that `run_local` raises decides
        self._hub.abort(reason)


class LocalWork(Work):
    """Collective that the hub has in flight."""

    def __init__(self, transport: LocalTransport, ticket: int, buffers: object) -> None:
        self._transport = transport
        self._ticket: int | None = ticket
        transport._lent[transport._group, transport.rank, ticket] = buffers

    def wait(self) -> None:
        """Waits until the hub has completed the collective; see `Work.wait`."""
        if self._ticket is None:
            return
        ticket, self._ticket = self._ticket, None
        transport = self._transport
        transport._hub.finish(transport._group, transport.rank, ticket)
        del transport._lent[transport._group, transport.rank, ticket]


class LocalChannel(Channel):
    """Channel with one native call that starts all messages and one that completes them."""

    def __init__(
        self,
        hub: native.LocalHub,
        group: int,
        rank: int,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._buffers = (*sends, *recvs)  # keeps the memory that the native channel points to
        self._native = native.LocalChannel(
            hub,
            group,
            rank,
            [(peer, each.data_ptr(), each.nbytes) for peer, each in sends],
            [(peer, each.data_ptr(), each.nbytes) for peer, each in recvs],
            tag,
        )

    def start(self) -> None:
        """Starts the round in the hub; see `Channel.start`."""
        self._native.start()

    def wait(self) -> None:
        """Waits until the round's messages have arrived; see `Channel.wait`."""
        self._native.wait()


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _buffer(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)
