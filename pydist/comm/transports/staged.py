"""Implements the transport `staged`: tensors of devices go through the memory of the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.nccl.device_assignment import device_missing


class StagedTransport(Transport):
    """Transport whose ranks compute on CUDA devices or on CPUs, each on its own kind.

    It copies tensors of a device to host memory, and sends them by another transport: nothing
    overlaps, and no CUDA graph captures an exchange. `nccl` is faster where all ranks have a
    device.

    Args:
        host: connects the same ranks.
        device: whose tensors are accepted besides host tensors; `None` on a rank without one.
        kinds: what each rank computes on, in rank order; by default all on the same.
        owns_host: whether closing this one closes `host`.
    """

    name = "staged"
    host_waits = True

    def __init__(
        self,
        host: Transport,
        device: torch.device | None,
        kinds: Sequence[str] = (),
        *,
        owns_host: bool = False,
    ) -> None:
        self.rank, self.size, self.concurrent = host.rank, host.size, host.concurrent
        self.device, self._kinds = device, kinds
        self.mixes = len(set(kinds)) > 1
        self._host, self._owns_host = host, owns_host

    @classmethod
    def over(cls, host: Transport, local_rank: int) -> StagedTransport:
        """Chooses a device for each rank that finds one. Collective.

        Args:
            host: connects all ranks of the job.
            local_rank: index among the ranks of this machine; chooses among its devices, which
                ranks may share.
        """
        device, kind = None, "cpu"
        if not device_missing():
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
            kind = torch.cuda.get_device_name(device)
        kinds = [each.decode() for each in host.all_gather_bytes(kind.encode())]
        return cls(host, device, kinds)

    def _subgroup(self, members: Sequence[int]) -> StagedTransport:
        kinds = [self._kinds[member] for member in members] if self._kinds else ()
        return StagedTransport(self._host._subgroup(members), self.device, kinds, owns_host=True)

    def _channel(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> Channel:
        if any(each.is_cuda for _, each in (*sends, *recvs)):
            return _StagedChannel(self._host, sends, recvs, tag)
        return self._host._channel(sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        self._host._send(tensor.cpu(), dest, tag)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        with on_host(tensor) as (copy,):
            self._host._recv(copy, source, tag)

    def _barrier(self) -> None:
        self._host._barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        with on_host(tensor) as (copy,):
            self._host._broadcast(copy, root)

    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        copies = [each.cpu() for each in outputs]
        sent = [each.cpu() for each in inputs]
        return _StagedWork(self._host._all_to_all_async(sent, copies), copies, outputs)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        with on_host(tensor) as (copy,):
            self._host._all_reduce(copy, op)

    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        self._all_reduce(tensor, op)
        return Work()

    def progress(self) -> None:
        """Lets the host's messages advance; see `Transport.progress`."""
        self._host.progress()

    def abort(self, reason: str, exit_code: int) -> None:
        """Ends the job; see `Transport.abort`."""
        self._host.abort(reason, exit_code)

    def close(self) -> None:
        """Closes the host's group, if it is of this one; see `Transport.close`."""
        if self._owns_host:
            self._host.close()


class _StagedWork(Work):
    """Work on the host, whose results are copied to the device when it is waited for.

    Args:
        work: of the host's transport, which keeps the copies until the messages have arrived.
        copies: in host memory.
        outputs: the tensors that were copied.
    """

    def __init__(self, work: Work, copies: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._work, self._pairs = work, list(zip(copies, outputs, strict=True))

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.wait()
        for copy, output in self._pairs:
            if copy is not output:
                output.copy_(copy)
        self._pairs.clear()


class _StagedChannel(Channel):
    """Channel that exchanges copies of the buffers in host memory.

    Args:
        host: sends the copies.
        sends: pairs of receiver and buffer.
        recvs: pairs of sender and buffer.
        tag: of the messages.
    """

    def __init__(
        self,
        host: Transport,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._sent, self._received = (
            [(each, torch.empty_like(each, device="cpu")) for _, each in pairs]
            for pairs in (sends, recvs)
        )
        self._channel = host._channel(
            [(peer, copy) for (peer, _), (_, copy) in zip(sends, self._sent, strict=True)],
            [(peer, copy) for (peer, _), (_, copy) in zip(recvs, self._received, strict=True)],
            tag,
        )

    def start(self) -> None:
        """Copies what is sent, and starts the round; see `Channel.start`."""
        for buffer, copy in self._sent:
            copy.copy_(buffer)
        self._channel.start()

    def wait(self) -> None:
        """Waits for the round, and copies what has arrived; see `Channel.wait`."""
        self._channel.wait()
        for buffer, copy in self._received:
            buffer.copy_(copy)

    def close(self) -> None:
        """Releases the channel of the host; see `Channel.close`."""
        self._channel.close()


@contextmanager
def on_host(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Copies tensors to host memory, and copies them back to the device at the end."""
    copies = [each.cpu() for each in tensors]
    yield copies
    for each, copy in zip(tensors, copies, strict=True):
        if copy is not each:
            each.copy_(copy)
