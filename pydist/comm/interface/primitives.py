"""What a transport provides: the operations that `Transport` calls when it has checked arguments.

Tensors are contiguous, detached and of a dtype that can be sent; ranks lie within the group, which
has at least two for all collectives. "Complete" and "in place" are as `transport` says. What has a
body here is right for all transports, and some have a faster way.
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
from pydist.comm.interface.ledger import Ledger
from pydist.comm.interface.reduction import ReduceOp, SliceSum
from pydist.errors import NotSupported


class Primitives(ABC):
    """The operations that an implementation of `Transport` provides.

    Attributes:
        name: what the transport is called in `pydist.init(transport=...)`.
        rank: this rank's index in the group, 0 <= rank < size.
        size: number of ranks in the group.
        watcher: is told of every exchanger that starts here, and of every tensor that is reduced
            or collected.
        concurrent: whether threads of a rank may call it concurrently; else they take turns.
        device: the CUDA device whose tensors it takes as well as those of host memory; None for
            most.
        host_waits: whether the host waits for exchanges of such tensors, so that no CUDA graph can
            hold them.
        below: what its class method `over(host, local_rank)` is given, if it is made over another
            transport: a name as in `pydist.init(transport=...)`.
    """

    name: ClassVar[str]
    rank: int
    size: int
    watcher: Callable[[Any], None] | None = None
    concurrent: bool = False
    device: torch.device | None = None
    host_waits: ClassVar[bool] = False
    below: ClassVar[str] = "host"

    @cached_property
    def ledger(self) -> Ledger:
        """Which calls this rank has started in the group, to be compared with the others."""
        return Ledger()

    def _check(self, call: str, tensor: Tensor) -> None:
        """Refuse tensors that the transport does not carry."""
        if tensor.device.type != "cpu" and tensor.device != self.device:
            where = f"rank {self.rank} works on {self.device}"
            if self.device is None:
                where = f"transport '{self.name}' carries host memory"
            raise NotSupported(f"{call}: tensor on {tensor.device}; {where}")
        check_elements(call, tensor)

    # -- point to point ---------------------------------------------------------------------

    @abstractmethod
    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        """Bind buffers to peers, this rank among them perhaps; empty buffers travel as well."""

    @abstractmethod
    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        """Send without waiting for the receiver; the tensor is free when the call returns."""

    @abstractmethod
    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        """Receive what was sent, of the same byte count."""

    # -- collectives ------------------------------------------------------------------------

    @abstractmethod
    def _barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensor on every rank with that of `root`."""

    @abstractmethod
    def _gather(self, tensor: Tensor, root: int) -> list[Tensor] | None:
        """On `root` one new tensor a rank, in rank order; None elsewhere."""

    @abstractmethod
    def _scatter(self, tensors: Sequence[Tensor] | None, out: Tensor, root: int) -> None:
        """`tensors` is None but on `root`; each is of the elements of `out`."""

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Fill `out` with the tensors of all ranks, in rank order; they are of equal size."""
        flat = out.view(-1)
        parts = list(flat.split(tensor.numel())) if tensor.numel() else [flat] * self.size
        parts[self.rank].copy_(tensor.view(-1))
        self._all_gather_async(parts[self.rank], parts, flat).wait()

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        """Start collecting: `out` consists of `parts`, and `tensor` is this rank's, in place."""
        del out
        return self._all_to_all_async([tensor] * self.size, parts)

    @abstractmethod
    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        """Start `all_to_all`; what this rank sends to itself is already in place."""

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        """Start summing into `out` what all ranks have as this rank's part, over the divisor."""
        received = [torch.empty_like(out) for _ in parts]
        received[self.rank] = parts[self.rank]
        return SliceSum(self._all_to_all_async(parts, received), received, out, divisor)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduce over ranks, in place, with the same bits on every rank."""

    @abstractmethod
    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        """Start `_all_reduce`."""

    # -- the group as a whole ---------------------------------------------------------------

    def progress(self) -> None:  # noqa: B027  most transports move bytes on their own
        """Let what is under way advance. Not collective, and cheap.

        For libraries that move bytes only while they are called (MPI): called between long
        computations, it hides there what would else be waited for.
        """

    @abstractmethod
    def abort(self, reason: str, exit_code: int) -> None:
        """End the whole job, now.

        `local` makes every blocked or later call of the other ranks raise `RankFailed` and
        returns; the others end all processes with `exit_code` and do not return.

        Args:
            reason: one line, shown to the user.
            exit_code: see `pydist.errors`.
        """

    def captured_in(self, graph: torch.cuda.CUDAGraph) -> None:  # noqa: B027  only NCCL cares
        """Take note of a CUDA graph with operations of these ranks: it can't outlive the group.

        Args:
            graph: is reset before the group closes, if it is still referenced then.
        """

    def forget_capture(self) -> None:  # noqa: B027  only NCCL cares
        """After a capture that failed: nothing of what was started within it will ever happen."""

    def close(self) -> None:  # noqa: B027  a transport may hold nothing
        """Release what the transport holds. Collective, idempotent."""
