"""Implements the transport over a CUDA-aware MPI, with one CUDA device per rank.

MPI receives the addresses of host and device tensors unchanged and distinguishes them itself. The
module `awareness` first queries whether it can, as a library without CUDA support would crash, or
silently copy through the host.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from pydist.comm.interface.handles import Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.cuda_mpi import awareness
from pydist.comm.transports.mpi.messages import MpiChannel
from pydist.comm.transports.mpi.transport import MpiTransport
from pydist.comm.transports.nccl.device_assignment import device_missing
from pydist.errors import NotSupported


class CudaMpiTransport(MpiTransport):
    """Transport of one rank that gives MPI the addresses of tensors on its CUDA device.

    MPI knows no streams: it may access a buffer as soon as it has the address. So before every call
    with device tensors, the host synchronizes with the caller's current stream. Results that MPI
    has completed are in place for all work that is enqueued later. The synchronization keeps
    kernels and launches from overlapping, and CUDA graphs can't capture an exchange; `nccl` and
    `ipc` have neither limitation.
    """

    name = "cuda-mpi"
    host_waits = True
    below = "mpi"
    device: torch.device

    def __init__(
        self,
        device: torch.device,
        comm: MPI.Comm | None = None,
        parent: CudaMpiTransport | None = None,
    ) -> None:
        """Duplicates a communicator. Collective.

        Args:
            device: the device whose tensors are accepted besides host tensors.
            comm: the ranks of the group; all ranks of the job if None.
            parent: the transport that this one is a subgroup of; None for the whole job.
        """
        super().__init__(comm, parent)
        self.device = device

    @classmethod
    def over(cls, host: Transport, local_rank: int) -> CudaMpiTransport:
        """Chooses this rank's device and checks that the MPI is CUDA-aware. Collective.

        Args:
            host: connects all ranks of the job; an `MpiTransport`.
            local_rank: index among the ranks of this machine; chooses among its devices, which
                ranks may share.

        Raises:
            NotSupported: the MPI is not CUDA-aware, or a rank has no device; the same on all ranks.
        """
        lacks = awareness.missing() or device_missing()
        found = host.all_gather_json([socket.gethostname(), lacks])
        for rank, (machine, lack) in enumerate(found):
            if lack:
                where = f"rank {rank} on {machine}: " if host.size > 1 else ""
                raise NotSupported(
                    f"transport 'cuda-mpi' carries device memory: {where}{lack}; use 'nccl', or"
                    " 'mpi', which carries host memory"
                )
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return cls(device)

    def rest(self, tensors: Sequence[Tensor]) -> None:
        """Waits for the caller's stream if MPI is about to access device memory."""
        if any(self._on_device(each) for each in tensors):
            self._wait_for_stream()

    def _wait_for_stream(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        event.synchronize()

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def _over(self, comm: MPI.Comm) -> CudaMpiTransport:
        return CudaMpiTransport(self.device, comm, self)

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> MpiChannel:
        return _DeviceChannel(self, sends, recvs, tag)

    def _post(self, message: Tensor, lender: Tensor, dest: int, tag: int) -> None:
        self.rest([message])
        super()._post(message, lender, dest, tag)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        self.rest([tensor])
        super()._recv(tensor, source, tag)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        self.rest([tensor])
        super()._broadcast(tensor, root)

    def _exchange_async(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> Work:
        self.rest([each for _, each in (*sends, *recvs)])
        return super()._exchange_async(sends, recvs)

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        self.rest([tensor, out])
        super()._all_gather(tensor, out)

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        self.rest([tensor, out])
        return super()._all_gather_async(tensor, parts, out)

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        if not self._on_device(out):
            return super()._reduce_scatter_async(parts, out, divisor)
        # The base class sums the slices with torch; `mpi` sums on the CPU.
        return Transport._reduce_scatter_async(self, parts, out, divisor)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        self.rest([tensor])
        super()._reduce(tensor, op)

    def _reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        self.rest([tensor])
        return super()._reduce_async(tensor, op)


class _DeviceChannel(MpiChannel):
    """Channel whose requests start when the caller's stream has reached them."""

    def __init__(
        self,
        transport: CudaMpiTransport,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        super().__init__(transport._messages, transport._engine, sends, recvs, tag)
        self._transport, self._tensors = transport, [each for _, each in (*sends, *recvs)]

    def start(self) -> None:
        """Starts the round when the tensors to be sent are complete; see `Channel.start`."""
        self._transport.rest(self._tensors)
        super().start()
