"""A bucket of whose gradients, and of whose optimizer step, each rank does its own part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pydist.comm.gradients.bucket import Bucket, pending_gradient
from pydist.comm.gradients.rows import in_order_of, memory_of
from pydist.comm.gradients.scattered import Family, ScatteredGradient

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport

# Parts begin at whole cache lines and vectors, so that optimizers treat them as they treat wholes.
_ALIGNMENT = 16


class Part(NamedTuple):
    """Where the parts of a parameter lie, in elements of its memory."""

    start: int
    stop: int
    """This rank's part."""
    counts: list[int]
    """Elements on each rank, in the order of ranks and of memory."""
    offset: int
    """Where the parameter begins in its bucket."""


class ScatteredBucket(Bucket):
    """Parameters of whose gradients, and of whose optimizer step, each rank does its own part.

    The bucket is one row of elements, of which each rank owns an interval. It keeps the mean of
    that; what a rank has accumulated for the others is given up as soon as they have it. A further
    backward accumulates anew, and its mean is added.

    Attributes:
        counts: elements that each rank owns, in the order of ranks.
        kept: by the id of a parameter, the gradient of earlier backwards while one is running.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], transport: Transport) -> None:
        super().__init__(parameters)
        elements = sum(p.numel() for p in parameters)
        chunk = -(-elements // (transport.size * _ALIGNMENT)) * _ALIGNMENT
        points = [min(rank * chunk, elements) for rank in range(transport.size + 1)]
        self._points = points
        self._transport = transport
        self.counts = [b - a for a, b in itertools.pairwise(points)]
        self._lo, self._hi = points[transport.rank], points[transport.rank + 1]
        self.kept: dict[int, ScatteredGradient] = {}
        self._own: Tensor | None = None
        self._released: set[int] = set()

    def parts(self) -> Iterator[tuple[nn.Parameter, Part]]:
        """Each parameter and its parts."""
        first = 0
        for parameter in self.parameters:
            last = first + parameter.numel()
            cuts = [min(max(p, first), last) - first for p in self._points]
            rank = self._transport.rank
            counts = [b - a for a, b in itertools.pairwise(cuts)]
            yield parameter, Part(cuts[rank], cuts[rank + 1], counts, first)
            first = last

    def start(self, transport: Transport) -> None:
        """Starts the mean of the gradients, of which this rank gets its part."""
        first = self.parameters[0]
        grad = pending_gradient(first) if len(self.parameters) == 1 else None
        if grad is not None and in_order_of(grad, first):
            self._row = memory_of(grad.detach())
        else:
            self._row = self._packed()
        self._own = torch.empty(self.counts[transport.rank], dtype=first.dtype, device=first.device)
        self._work = transport.reduce_scatter_async(
            self._row, self._own, self.counts, transport.size
        )

    def release(self) -> bool:
        """See `Bucket.release`."""
        if self._work is None or not self._work.done():
            return False
        self._work.wait()  # at once; it lets go of the memory as well
        self._row = None
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is None or grad.requires_grad or isinstance(grad, ScatteredGradient):
                continue
            parameter.grad = None
            self._released.add(id(parameter))
        return True

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """See `Bucket.has_gradient`."""
        return parameter.grad is not None or id(parameter) in self._released

    def finish(self, family: Family, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """Puts what stands for the mean in the place of the gradients."""
        assert self._own is not None
        for parameter, part in self.parts():
            grad = parameter.grad
            if grad is not None and grad.requires_grad:
                continue  # create_graph: reduced on its way
            earlier = self.kept.get(id(parameter))
            if earlier is None and isinstance(grad, ScatteredGradient):
                earlier = grad
            if earlier is None and not has_gradient(parameter):
                continue
            piece = self._own[self._place(part)]
            if earlier is not None:
                piece += earlier.piece
            parameter.grad = ScatteredGradient(parameter, piece, family)
        self._forget()

    def abandon(self, *, wait: bool = True) -> None:
        """See `Bucket.abandon`."""
        super().abandon(wait=wait)
        for parameter in self.parameters:
            if id(parameter) in self.kept:
                parameter.grad = self.kept[id(parameter)]
        self._forget()

    def set_aside(self, parameter: nn.Parameter) -> None:
        """Makes room for what a backward accumulates, if there is a scattered gradient already."""
        grad = parameter.grad
        if isinstance(grad, ScatteredGradient):
            self.kept[id(parameter)] = grad
            parameter.grad, grad.pending = grad.pending, None

    def put_back(self, parameter: nn.Parameter) -> None:
        """Puts that gradient back, with what was accumulated and is not to be reduced yet."""
        earlier = self.kept.pop(id(parameter), None)
        if earlier is not None:
            parameter.grad, earlier.pending = earlier, parameter.grad

    def gather_gradients(self) -> None:
        """Makes the gradients whole on all ranks. Collective."""
        if not any(isinstance(p.grad, ScatteredGradient) for p in self.parameters):
            return
        first = self.parameters[0]
        row = torch.zeros(sum(self.counts), dtype=first.dtype, device=first.device)
        own = row[self._lo : self._hi]
        for parameter, part in self.parts():
            if isinstance(parameter.grad, ScatteredGradient):
                own[self._place(part)] = parameter.grad.piece
        self._transport.all_gather_async(own, row, self.counts).wait()
        alone = len(self.parameters) == 1
        for parameter, piece in self._pieces(row):
            grad = parameter.grad
            if isinstance(grad, ScatteredGradient):
                parameter.grad = piece if alone else piece.clone()
                if grad.pending is not None:
                    parameter.grad += grad.pending

    def _place(self, part: Part) -> slice:
        """Where a parameter's part lies in what this rank owns."""
        start = max(part.offset + part.start - self._lo, 0)
        return slice(start, start + part.stop - part.start)

    def _forget(self) -> None:
        self._row = self._work = self._own = None
        self._released.clear()
        self.kept.clear()

    def start_gathering_values(self) -> None:
        """Starts to collect the parameters themselves, of which each rank has its part."""
        if len(self.parameters) == 1:
            self._row = memory_of(self.parameters[0].detach())
        else:
            self._row = self._packed_values()
        own = self._row[self._lo : self._hi]
        self._work = self._transport.all_gather_async(own, self._row, self.counts)

    def finish_gathering_values(self, changed: Collection[int]) -> None:
        """Waits until those parameters, by their ids, are whole and equal on all ranks."""
        assert self._work is not None
        assert self._row is not None
        self._work.wait()
        for parameter, piece in self._pieces(self._row):
            if id(parameter) in changed and parameter.grad is not None:
                if len(self.parameters) > 1:
                    parameter.detach().copy_(piece)
                # Written behind torch's back: whoever kept a value for backward must notice.
                torch.autograd.graph.increment_version(parameter)
        self._row = self._work = None

    def _packed_values(self) -> Tensor:
        first = self.parameters[0]
        row = torch.empty(sum(self.counts), dtype=first.dtype, device=first.device)
        for parameter, piece in self._pieces(row):
            piece.copy_(parameter.detach())
        return row
