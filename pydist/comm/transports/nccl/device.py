"""Communicates tensors of one CUDA device, by NCCL on a stream of its own.

The host never waits for the device. Events order an operation after the work on the caller's
current stream, and `wait` orders the caller's next work after the operation. Until then the
transport keeps the tensors, so that the allocator does not reuse their memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from pydist._loader import native
from pydist.comm.interface.checks import check_elements
from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.reduction import WIDER, ReduceOp, divide_
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.host import HostTransport
from pydist.errors import NotSupported, PydistError


class DeviceTransport(HostTransport):
    """Transport that carries tensors of this rank's device through an NCCL communicator.

    Reductions in which NCCL differs from torch (narrow dtypes, NaN in extrema) are handled as for
    libraries of host memory, with torch's kernels on the device.
    """

    name = "nccl"

    def __init__(
        self, group: native.NcclCommunicator, host: Transport, device: torch.device
    ) -> None:
        """Wraps a communicator.

        Args:
            group: connects the ranks of `host`, in the same order.
            host: carries operations that NCCL does not support.
            device: the device of all tensors.
        """
        self.rank, self.size = host.rank, host.size
        self.device = device
        self._group, self._host = group, host
        self._under_way: set[NcclWork] = set()

    def queue(self) -> int:
        """Returns the handle of the caller's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def keep(self, tensor: Tensor) -> None:
        """Tells the allocator that NCCL's stream uses the tensor's memory."""
        if tensor.is_cuda:
            stream = torch.cuda.ExternalStream(self._group.stream, device=self.device)
            tensor.record_stream(stream)

    def _check(self, call: str, tensor: Tensor, *, strided: bool = False) -> None:
        if tensor.device != self.device:
            raise NotSupported(
                f"{call}: tensor on {tensor.device}; rank {self.rank} works on {self.device}"
            )
        check_elements(call, tensor, strided=strided)

    def _note(self, *what: Hashable, waits: bool = True) -> None:
        """Does nothing: the transport above has entered the call in its ledger."""

    def _subgroup(self, members: Sequence[int]) -> Transport:
        raise AssertionError("groups are made from the host's, see NcclTransport")

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> NcclChannel:
        return NcclChannel(self, sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        # NCCL knows no tags, and blocks a send until its receiver is ready, which `send` must not
        # do: single messages go through the host.
        self._host.send(tensor.cpu(), dest, tag)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._host.recv(received, source, tag)
        tensor.copy_(received)

    def _barrier(self) -> None:
        self._host.barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        if tensor.numel():
            ticket = self._group.broadcast(tensor.data_ptr(), tensor.nbytes, root, self.queue())
            NcclWork(self, ticket, [tensor]).wait()

    def _exchange_async(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> Work:
        ticket = self._group.exchange(as_messages(sends), as_messages(recvs), self.queue())
        return NcclWork(self, ticket, [each for _, each in (*sends, *recvs)])

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        if not out.numel():
            return Work()
        sizes = [each.nbytes for each in parts]
        return NcclWork(
            self, self._group.all_gather(out.data_ptr(), sizes, self.queue()), [tensor, out]
        )

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        if out.dtype in WIDER:
            return super()._reduce_scatter_async(parts, out, divisor)
        counts = [each.numel() for each in parts]
        if not any(counts):
            return Work()
        ticket = self._group.reduce_scatter(
            _address(parts), counts, _name(out), out.data_ptr(), self.queue()
        )
        return _Divided(self, ticket, [*parts, out], out, divisor)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        self._reduce_async(tensor, op).wait()

    def _reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        ticket = self._group.all_reduce(
            tensor.data_ptr(), tensor.numel(), _name(tensor), op, self.queue()
        )
        return NcclWork(self, ticket, [tensor])

    def abort(self, reason: str, exit_code: int) -> None:
        """Aborts the operations in flight on this rank's device; ends no process."""
        del reason, exit_code
        self._group.abort()

    def check_order(self) -> None:
        """Checks that ranks have started their exchanges in the same order. Collective.

        Raises:
            PydistError: the orders differ, so that messages have gone to wrong buffers.
        """
        said = [torch.tensor([_signed(each)], device="cpu") for each in self._group.sent]
        heard = [torch.empty_like(each) for each in said]
        self._host.all_to_all(said, heard)
        for peer, (here, there) in enumerate(zip(self._group.received, heard, strict=True)):
            if _signed(here) != int(there):
                raise PydistError(
                    f"ranks {peer} and {self.rank} have started exchanges in different orders, or"
                    " one has started more: what NCCL has carried between them can't be trusted;"
                    " please report this"
                )

    def forget_capture(self) -> None:
        """Forgets operations that a step has waited for; see `Transport.forget_capture`."""
        super().forget_capture()
        self._under_way.clear()

    def close(self) -> None:
        """Closes the communicator; see `Transport.close`."""
        self._group.close()
        self._under_way.clear()


class NcclWork(Work):
    """Operation that runs on NCCL's stream."""

    def __init__(
        self, transport: DeviceTransport, ticket: native.NcclTicket, buffers: Sequence[Tensor]
    ) -> None:
        self._transport, self._buffers = transport, buffers
        self._ticket: native.NcclTicket | None = ticket
        self._queue = transport.queue()
        transport._under_way.add(self)

    def wait(self) -> None:
        """Makes the caller's current stream wait, not the host; see `Work.wait`."""
        if self._ticket is None:
            return
        ticket, self._ticket = self._ticket, None
        transport = self._transport
        queue = transport.queue()
        ticket.wait(queue)
        if queue != self._queue:  # the memory may be returned to a stream that does not wait
            for each in self._buffers:
                transport.keep(each)
        transport._under_way.discard(self)
        self._buffers = []
        self._finish()

    def _finish(self) -> None:
        """Enqueues work after the operation, on the caller's stream."""

    def done(self) -> bool:
        """Returns whether the operation is complete on the device; see `Work.done`."""
        return self._ticket is None or self._ticket.reached()


class _Divided(NcclWork):
    """Sum that is divided into a mean when it is complete."""

    def __init__(
        self,
        transport: DeviceTransport,
        ticket: native.NcclTicket,
        buffers: Sequence[Tensor],
        out: Tensor,
        divisor: int,
    ) -> None:
        super().__init__(transport, ticket, buffers)
        self._out, self._divisor = out, divisor

    def _finish(self) -> None:
        divide_(self._out, self._divisor)


class NcclChannel(Channel):
    """Channel whose native call starts an entire exchange: events, and one NCCL group."""

    def __init__(
        self,
        transport: DeviceTransport,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._transport = transport
        self.stream = transport._group.stream
        self._buffers = [each for _, each in (*sends, *recvs)]
        for each in self._buffers:
            transport.keep(each)
        # NCCL matches by order; the tag is for `check_order`.
        self._native = native.NcclChannel(
            transport._group, as_messages(sends), as_messages(recvs), tag
        )

    def start(self) -> None:
        """Starts the round after the work on the caller's current stream; see `Channel.start`."""
        self._native.start(self._transport.queue())

    def wait(self) -> None:
        """Makes the caller's current stream wait, not the host; see `Channel.wait`."""
        self._native.wait(self._transport.queue())


def as_messages(pairs: Sequence[tuple[int, Tensor]]) -> list[tuple[int, int, int]]:
    """Returns peer, address and byte count of each buffer."""
    return [(peer, each.data_ptr(), each.nbytes) for peer, each in pairs]


def _address(parts: Sequence[Tensor]) -> int:
    """Returns the start of contiguous slices; empty slices have no address of their own."""
    before = 0
    for each in parts:
        if each.numel():
            return each.data_ptr() - before
        before += each.nbytes
    return 0


def _signed(number: int) -> int:
    """Reinterprets an unsigned 64-bit number as signed, as torch stores it."""
    return number - (1 << 64) if number >> 63 else number


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
