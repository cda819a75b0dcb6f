"""The base class of transports that forward each call to the one that carries its tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport


class RoutedTransport(Transport):
    """Device transport that forwards each call to the transport that carries its tensors.

    A subclass chooses the transport for given tensors, creates subgroups, and closes both.
    """

    @abstractmethod
    def _of(self, tensors: Sequence[Tensor]) -> Transport:
        """Returns the transport for these tensors, which are checked."""

    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        return self._of([each for _, each in (*sends, *recvs)])._channel(sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        self._of([tensor])._send(tensor, dest, tag)

    def _lend(self, tensor: Tensor, lender: Tensor, dest: int, tag: int) -> None:
        self._of([tensor])._lend(tensor, lender, dest, tag)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        self._of([tensor])._recv(tensor, source, tag)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        self._of([tensor])._broadcast(tensor, root)

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        self._of([tensor])._all_gather(tensor, out)

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        return self._of([tensor, out])._all_gather_async(tensor, parts, out)

    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        return self._of([*inputs, *outputs])._all_to_all_async(inputs, outputs)

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        return self._of([*parts, out])._reduce_scatter_async(parts, out, divisor)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        self._of([tensor])._all_reduce(tensor, op)

    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self._of([tensor])._all_reduce_async(tensor, op)
