"""A transport that can be silenced: the code path of a split run without messages.

Benchmarks use it as a bound: the same shards, kernels and bookkeeping on all ranks. A silenced rank
receives only its own values: results have the right shapes and wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pydist.comm import Channel, Transport, Work
from pydist.comm.interface.ledger import STAMP_BYTES, Ledger


def stamp(ledger: Ledger, received: Sequence[Tensor]) -> None:
    """Writes this rank's stamp to the start of buffers in host memory, as in received messages."""
    own = torch.frombuffer(bytearray(ledger.stamp()), dtype=torch.uint8)
    for buffer in received:
        if not buffer.is_cuda:
            buffer.view(-1).view(torch.uint8)[:STAMP_BYTES].copy_(own)


def clear_comparison(tensor: Tensor, op: Any) -> None:
    """Sets the first integer of a message, which ranks compare, to 0: the sum if they agree."""
    if op == "sum" and tensor.dtype == torch.int64 and tensor.numel() and not tensor.is_cuda:
        tensor.view(-1)[0] = 0


def as_transport(stand_in: SilencedTransport | Noting) -> Transport:
    """Casts a stand-in to the transport that it replaces."""
    return cast(Transport, stand_in)


class SilencedTransport:
    """Stand-in for a transport that forwards every call to it, until `quiet` is set.

    Attributes:
        quiet: whether messages are suppressed, in groups made from this one as well; set it after
            models and meshes are made.
        awaited: whether every exchange over a channel is awaited as soon as it has started.
        kept: bytes of suppressed messages.
    """

    def __init__(self, transport: Transport, parent: SilencedTransport | None = None) -> None:
        self._transport = transport
        self._first: SilencedTransport = parent._first if parent is not None else self
        self._quiet = self._awaited = False
        self.kept = 0

    @property
    def quiet(self) -> bool:
        return self._first._quiet

    @quiet.setter
    def quiet(self, value: bool) -> None:
        self._first._quiet = value

    @property
    def awaited(self) -> bool:
        return self._first._awaited

    @awaited.setter
    def awaited(self, value: bool) -> None:
        self._first._awaited = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        # All ranks call it at the same point, but it is not collective: a quiet one takes no part.
        for _, buffer in recvs:
            buffer.zero_()  # uninitialized memory may hold NaN or slow denormal numbers
        return _SilencedChannel(self, sends, recvs, tag)

    def split(self, color: int, key: int) -> SilencedTransport:
        return SilencedTransport(self._transport.split(color, key), self)

    def barrier(self) -> None:
        if not self.quiet:
            self._transport.barrier()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self._speaks(tensor):
            self._transport.broadcast(tensor, root)

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> None:
        if self._speaks(tensor):
            self._transport.all_reduce(tensor, op)
        else:
            clear_comparison(tensor, op)

    def all_reduce_async(self, tensor: Tensor, op: Any = "sum") -> Work:
        return self._transport.all_reduce_async(tensor, op) if self._speaks(tensor) else Work()

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self._speaks(tensor):
            return self._transport.all_gather(tensor)
        return tensor.detach().expand(self.size, *tensor.shape).contiguous()

    def all_gather_async(self, tensor: Tensor, out: Tensor, counts: Any = None) -> Work:
        if self._speaks(tensor):
            return self._transport.all_gather_async(tensor, out, counts)
        if counts is None:  # statistics: similar on all ranks, as garbage would affect later steps
            out.detach().view(self.size, -1).copy_(tensor.detach().reshape(1, -1))
        return Work()

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self._speaks(*inputs):
            self._transport.all_to_all(inputs, outputs)
        else:
            for out in outputs:
                out.detach().zero_()

    def reduce_scatter_async(
        self, tensor: Tensor, out: Tensor, counts: Any = None, divisor: int = 1
    ) -> Work:
        if self._speaks(tensor):
            return self._transport.reduce_scatter_async(tensor, out, counts, divisor)
        start = sum(counts[: self.rank]) if counts is not None else self.rank * out.numel()
        out.detach().view(-1).copy_(tensor.detach().view(-1)[start : start + out.numel()])
        return Work()

    def _speaks(self, *tensors: Tensor) -> bool:
        if not self.quiet:
            return True
        self._first.kept += sum(each.nbytes for each in tensors)
        return False


class Noting:
    """Stand-in for a transport that counts the bytes in flight when a rank has to wait.

    Attributes:
        exposed: bytes of unfinished messages at the first wait, as bytes of an all-reduce, which is
            a reduce-scatter and an all-gather of the same size.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: list[_Noted] = []
        self.exposed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def all_reduce_async(self, tensor: Tensor, op: Any = "sum") -> Work:
        return self._note(self._transport.all_reduce_async(tensor, op), tensor.nbytes)

    def reduce_scatter_async(self, tensor: Tensor, *args: Any) -> Work:
        work = self._transport.reduce_scatter_async(tensor, *args)
        return self._note(work, tensor.nbytes / 2)

    def all_gather_async(self, tensor: Tensor, out: Tensor, counts: Any = None) -> Work:
        return self._note(self._transport.all_gather_async(tensor, out, counts), out.nbytes / 2)

    def _note(self, work: Work, nbytes: float) -> Work:
        self._under_way.append(_Noted(self, work, nbytes))
        return self._under_way[-1]

    def look(self) -> None:
        """Records a wait of this rank."""
        self.exposed += sum(each.nbytes for each in self._under_way if not each.done())
        self._under_way.clear()


class _Noted(Work):
    def __init__(self, owner: Noting, work: Work, nbytes: float) -> None:
        self._owner, self._work, self.nbytes = owner, work, nbytes

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        if not self.done():
            self._owner.look()
        self._work.wait()


class _SilencedChannel(Channel):
    def __init__(
        self,
        owner: SilencedTransport,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._owner, self._bytes = owner, sum(buffer.nbytes for _, buffer in sends)
        self._channel = owner._transport.channel(sends, recvs, tag)
        self.stream = self._channel.stream
        self._started = False
        self._received = [buffer for _, buffer in recvs]

    def start(self) -> None:
        if self._owner.quiet:
            self._owner._first.kept += self._bytes
            stamp(self._owner.ledger, self._received)
        else:
            self._started = True
            self._channel.start()
            if self._owner.awaited:
                self.wait()

    def wait(self) -> None:
        if self._started:
            self._started = False
            self._channel.wait()

    def close(self) -> None:
        self._channel.close()
