"""Provides the base class of transports over other communication libraries.

The libraries reduce neither all dtypes nor NaN as torch does, and their collectives differ in what
they support; this class reduces everything to a few calls that all of them provide.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from pydist.comm.interface.handles import Work
from pydist.comm.interface.reduction import WIDER, ReduceOp
from pydist.comm.interface.transport import Transport

_GATHERED_BYTES = 1 << 24
"""Most memory that a reduction by gathering uses at a time."""


class HostTransport(Transport):
    """Transport over a library that exchanges bytes and reduces plain numbers."""

    @abstractmethod
    def _exchange_async(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]
    ) -> Work:
        """Starts sending and receiving (peer, tensor) messages, separate from `send` and `recv`.

        No peer is this rank. Messages between the same ranks match in order.
        """

    @abstractmethod
    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduces float32, float64, int32, int64 or uint8 in place; no "max" or "min" of floats."""

    @abstractmethod
    def _reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        """Starts `_reduce`; complete when `wait` has returned."""

    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        # Both sides know the byte counts, so that empty messages need not be sent.
        return self._exchange_async(
            [(peer, each) for peer, each in self._others(inputs) if each.numel()],
            [(peer, each) for peer, each in self._others(outputs) if each.numel()],
        )

    def _others(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Pairs all other ranks with their tensors, the next rank first to spread the load."""
        order = [(self.rank + step) % self.size for step in range(1, self.size)]
        return [(peer, tensors[peer]) for peer in order]

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        if not tensor.numel():
            return
        if tensor.is_floating_point() and op != "sum":
            self._extremum(tensor, op)
        elif tensor.dtype in WIDER:
            wide = tensor.to(WIDER[tensor.dtype])
            self._reduce(wide, _plain(tensor, op))
            tensor.copy_(wide)
        else:
            self._reduce(tensor, op)

    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        if not tensor.numel():
            return Work()
        if tensor.is_floating_point() and op != "sum":
            self._extremum(tensor, op)
            return Work()
        if tensor.dtype in WIDER:
            wide = tensor.to(WIDER[tensor.dtype])
            return _Narrowed(self._reduce_async(wide, _plain(tensor, op)), wide, tensor)
        return self._reduce_async(tensor, op)

    def _extremum(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduces by gathering: for floats, libraries lose NaN or keep it on some ranks only."""
        flat = tensor.view(-1)
        step = max(1, _GATHERED_BYTES // (tensor.element_size() * self.size))
        for piece in flat.split(step):
            rows = self.all_gather(piece)
            piece.copy_(rows.amax(0) if op == "max" else rows.amin(0))


class _Narrowed(Work):
    """Reduction in a wider dtype, rounded into place when it is complete."""

    def __init__(self, work: Work, wide: Tensor, tensor: Tensor) -> None:
        self._pending: tuple[Work, Tensor, Tensor] | None = (work, wide, tensor)

    def wait(self) -> None:
        """Waits for the sum in the wider dtype, and stores it; see `Work.wait`."""
        if self._pending is None:
            return
        work, wide, tensor = self._pending
        self._pending = None
        work.wait()
        tensor.copy_(wide)


def _plain(tensor: Tensor, op: ReduceOp) -> ReduceOp:
    """Returns the operation in the wider dtype: "any" of bool is the maximum of 0 and 1."""
    return "max" if tensor.dtype == torch.bool and op == "sum" else op
