"""A bucket: parameters whose gradients travel in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pydist.comm.gradients.rows import in_order_of, memory_of, shaped_like
from pydist.comm.gradients.scattered import Family, ScatteredGradient
from pydist.comm.interface.reduction import divide

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Work
    from pydist.comm.interface.transport import Transport


class Bucket:
    """Some parameters whose gradients travel in one all-reduce."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self._flat: Tensor | None = None
        self._row: Tensor | None = None
        self._work: Work | None = None

    def start(self, transport: Transport) -> None:
        """Starts the sum of the gradients; a missing one counts as zero."""
        self._row = self._own_memory() if len(self.parameters) == 1 else None
        if self._row is None:
            self._row = self._packed()
        self._work = transport.all_reduce_async(self._row)

    def wait(self) -> None:
        """Waits until its message has arrived everywhere; before `finish`."""
        assert self._work is not None
        self._work.wait()

    def finish(self, family: Family, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """Makes the mean the gradients.

        Args:
            family: takes up gradients that stay scattered.
            has_gradient: whether any rank has a gradient for the parameter.
        """
        assert self._row is not None
        divide(self._row, family.transport.size)
        for parameter, piece in self._pieces(self._row):
            grad = parameter.grad
            if grad is None:
                if has_gradient(parameter):
                    parameter.grad = piece.clone()
            elif not grad.requires_grad and grad.data_ptr() != piece.data_ptr():
                # One with a graph (create_graph) was reduced on its way, differentiably.
                grad.copy_(piece)
        self._row = self._work = None

    def set_aside(self, parameter: nn.Parameter) -> None:
        """Before a backward accumulates: an ordinary gradient is accumulated further."""

    def put_back(self, parameter: nn.Parameter) -> None:
        """After it has, where gradients are not reduced."""

    def release(self) -> bool:
        """Lets go of gradients that other ranks have by now; whether it needs no further call."""
        return True

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has one."""
        return parameter.grad is not None

    def abandon(self, *, wait: bool = True) -> None:
        """Lets go of what a backward that raised left under way.

        Args:
            wait: for its messages, as until then memory is written; not for those of a CUDA graph
                that there will never be.
        """
        if wait and self._work is not None:
            self._work.wait()
        self._row = self._work = None

    def _own_memory(self) -> Tensor | None:
        """The memory of the one gradient, if it may be overwritten as it is; else None."""
        parameter = self.parameters[0]
        grad = parameter.grad
        if grad is None or grad.requires_grad or not in_order_of(grad, parameter):
            return None
        # What backward handed over may share memory with another gradient.
        storage = grad.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > 2:  # the gradient's, and `storage`'s
            return None
        return memory_of(grad)

    def _packed(self) -> Tensor:
        """The gradients copied together."""
        first = self.parameters[0]
        if self._flat is None or self._flat.dtype != first.dtype:
            elements = sum(p.numel() for p in self.parameters)
            self._flat = torch.empty(elements, dtype=first.dtype, device=first.device)
        for parameter, piece in self._pieces(self._flat):
            grad = pending_gradient(parameter)
            if grad is None:
                piece.zero_()
            else:
                piece.copy_(grad.detach())
        return self._flat

    def _pieces(self, row: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and its place in a row that holds all of them."""
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            yield parameter, shaped_like(row[start:stop], parameter)
            start = stop


def pending_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What this rank has accumulated and the ranks have not reduced yet."""
    grad = parameter.grad
    return grad.pending if isinstance(grad, ScatteredGradient) else grad
