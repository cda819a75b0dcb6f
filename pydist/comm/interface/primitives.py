"""The operations that a transport implements; `Transport` calls them with checked arguments.

Tensors are contiguous (but those of `_send`), detached and of a dtype that can be sent; ranks are
within the group, which has at least two ranks for all collectives. `transport` defines "complete"
and "in place". The implementations here are correct for all transports; some transports override
them with faster ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from pydist.comm.interface.checks import check_elements
from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.ledger import GROUP_SIZES, Ledger
from pydist.comm.interface.reduction import ReduceOp, SliceSum
from pydist.errors import NotSupported


class Primitives(ABC):
    """Operations that an implementation of `Transport` provides.

    Attributes:
        name: the transport's name in `pydist.init(transport=...)`.
        rank: this rank's index in the group, 0 <= rank < size.
        size: number of ranks in the group.
        watcher: called with every exchanger that starts here, and with every tensor that is reduced
            or gathered.
        concurrent: whether threads of a rank may call it concurrently; else they take turns.
        device: the CUDA device whose tensors it accepts besides host tensors; None for most.
        host_waits: whether the host waits for exchanges of device tensors, which CUDA graphs then
            can't capture.
        mixes: whether its ranks compute on different kinds of devices, such as CPUs and GPUs, whose
            results differ in their last bits.
        below: the name, as in `pydist.init(transport=...)`, of the transport that its class method
            `over(host, local_rank)` builds on, if it has one.
    """

    name: ClassVar[str]
    rank: int
    size: int
    watcher: Callable[[Any], None] | None = None
    concurrent: bool = False
    device: torch.device | None = None
    host_waits: ClassVar[bool] = False
    mixes: bool = False
    below: ClassVar[str] = "host"

    @cached_property
    def ledger(self) -> Ledger:
        """The calls that this rank has started in the group, for comparison with other ranks."""
        if self.size > 1:
            GROUP_SIZES.add(self.size)
        return Ledger()

    def _check(self, call: str, tensor: Tensor, *, strided: bool = False) -> None:
        """Refuses tensors that the transport does not carry; see `check_elements`."""
        if tensor.device.type != "cpu" and tensor.device != self.device:
            where = f"rank {self.rank} works on {self.device}"
            if self.device is None:
                where = f"transport '{self.name}' carries host memory"
            raise NotSupported(f"{call}: tensor on {tensor.device}; {where}")
        check_elements(call, tensor, strided=strided)

    # -- point to point ---------------------------------------------------------------------

    @abstractmethod
    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        """Binds buffers to peers, possibly this rank itself; empty buffers are sent as well."""

    @abstractmethod
    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        """Sends without waiting for the receiver; the tensor is free when the call returns.

        It may have any strides: the copy that waits for the receiver is contiguous.
        """

    def _lend(self, tensor: Tensor, lender: Tensor, dest: int, tag: int) -> None:
        """Sends like `_send` a contiguous tensor, which does not change while a lender is held."""
        self._send(tensor, dest, tag)

    @abstractmethod
    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        """Receives a message of the tensor's byte count."""

    # -- collectives ------------------------------------------------------------------------

    @abstractmethod
    def _barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrites the tensor on every rank with the tensor of `root`."""

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Fills `out` with the tensors of all ranks, in rank order; they are of equal size."""
        flat = out.view(-1)
        parts = list(flat.split(tensor.numel())) if tensor.numel() else [flat] * self.size
        parts[self.rank].copy_(tensor.view(-1))
        self._all_gather_async(parts[self.rank], parts, flat).wait()

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        """Starts an all-gather into `out`, made of `parts`; `tensor` is this rank's part."""
        del out
        return self._all_to_all_async([tensor] * self.size, parts)

    @abstractmethod
    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        """Starts `all_to_all`; this rank's message to itself is already in place."""

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        """Starts summing all ranks' parts for this rank into `out`, divided by the divisor."""
        received = [torch.empty_like(out) for _ in parts]
        received[self.rank] = parts[self.rank]
        return SliceSum(self._all_to_all_async(parts, received), received, out, divisor)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduces over ranks in place, with bit-identical results on every rank."""

    @abstractmethod
    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        """Starts `_all_reduce`."""

    # -- the group as a whole ---------------------------------------------------------------

    def progress(self) -> None:  # noqa: B027  most transports move bytes on their own
        """Lets operations in flight advance. Not collective, and cheap.

        For libraries that transfer data only inside of calls (MPI): called between long
        computations, it overlaps communication with them.
        """

    @abstractmethod
    def abort(self, reason: str, exit_code: int) -> None:
        """Ends the entire job immediately.

        `local` makes every blocked or later call of the other ranks raise `RankFailed` and
        returns; the others end all processes with `exit_code` and do not return.

        Args:
            reason: one line, shown to the user.
            exit_code: see `pydist.errors`.
        """

    def captured_in(self, graph: torch.cuda.CUDAGraph) -> None:  # noqa: B027  only NCCL cares
        """Registers a CUDA graph with operations of these ranks; it can't outlive the group.

        Args:
            graph: reset before the group closes, if it is still referenced then.
        """

    def forget_capture(self) -> None:  # noqa: B027  only NCCL cares
        """Discards operations of a failed capture: none of them will ever run."""

    def close(self) -> None:  # noqa: B027  a transport may hold nothing
        """Releases the transport's resources. Collective, idempotent."""
