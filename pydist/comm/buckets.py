"""Buckets: parameters whose gradients travel in one message."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pydist.comm.scattered import Family, ScatteredGradient

if TYPE_CHECKING:
    from pydist.comm.handles import Work
    from pydist.comm.transport import Transport

# Large enough that latency is nothing beside the transfer, small enough that the first bucket
# leaves while most of backward is still to run.
BUCKET_BYTES = 8 << 20
# From here on a gradient travels alone, out of its own memory: copying costs more than a message.
ALONE_BYTES = 256 << 10
# Parts begin at whole cache lines and vectors, so that optimizers treat them as they treat wholes.
_ALIGNMENT = 16


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

    def finish(self, family: Family, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """Waits, and makes the mean the gradients.

        Args:
            family: takes up gradients that stay scattered.
            has_gradient: whether any rank has a gradient for the parameter.
        """
        assert self._work is not None
        assert self._row is not None
        self._work.wait()
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

    def abandon(self) -> None:
        """Waits for what a backward that raised left under way: until then memory is written."""
        if self._work is not None:
            self._work.wait()
        self._row = self._work = None

    def _own_memory(self) -> Tensor | None:
        """The memory of the one gradient, if it may be overwritten as it is; else None."""
        parameter = self.parameters[0]
        grad = parameter.grad
        if grad is None or grad.requires_grad or not _in_order_of(grad, parameter):
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
            grad = local_gradient(parameter)
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

    The bucket is one row of elements, of which each rank owns an interval. Gradients stay what the
    rank itself accumulated; the mean of the own part lies beside them, in `own`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], transport: Transport) -> None:
        super().__init__(parameters)
        elements = sum(p.numel() for p in parameters)
        chunk = -(-elements // (transport.size * _ALIGNMENT)) * _ALIGNMENT
        points = [min(rank * chunk, elements) for rank in range(transport.size + 1)]
        self._points = points
        self._transport = transport
        self.counts = [b - a for a, b in itertools.pairwise(points)]
        self.lo, self.hi = points[transport.rank], points[transport.rank + 1]
        first = parameters[0]
        self.own = torch.zeros(self.hi - self.lo, dtype=first.dtype, device=first.device)

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
        """Starts the sum of the gradients, of which this rank gets its part."""
        grad = local_gradient(self.parameters[0]) if len(self.parameters) == 1 else None
        if grad is not None and _in_order_of(grad, self.parameters[0]):
            self._row = memory_of(grad.detach())
        else:
            self._row = self._packed()
        self._work = transport.reduce_scatter_async(self._row, self.own, self.counts)

    def finish(self, family: Family, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """Waits, and puts what stands for the mean in the place of the gradients."""
        assert self._work is not None
        self._work.wait()
        self._row = self._work = None
        divide(self.own, family.transport.size)
        for parameter, part in self.parts():
            grad = parameter.grad
            if grad is None and not has_gradient(parameter):
                continue
            if grad is not None and grad.requires_grad:
                continue  # create_graph: reduced on its way
            local = local_gradient(parameter)
            parameter.grad = ScatteredGradient(parameter, self.piece(part), local, family)

    def piece(self, part: Part) -> Tensor:
        """This rank's part of a gradient's mean, a view of `own`."""
        first = max(part.offset + part.start - self.lo, 0)
        return self.own[first : first + part.stop - part.start]

    def gather_gradients(self) -> None:
        """Makes the gradients whole on all ranks. Collective."""
        if not any(isinstance(p.grad, ScatteredGradient) for p in self.parameters):
            return
        row = self.own.new_empty(sum(self.counts))
        self._transport.all_gather_async(self.own, row, self.counts).wait()
        alone = len(self.parameters) == 1
        for parameter, piece in self._pieces(row):
            if isinstance(parameter.grad, ScatteredGradient):
                parameter.grad = piece if alone else piece.clone()

    def start_gathering_values(self) -> None:
        """Starts to collect the parameters themselves, of which each rank has its part."""
        if len(self.parameters) == 1:
            self._row = memory_of(self.parameters[0].detach())
        else:
            self._row = self.own.new_empty(sum(self.counts))
            for parameter, piece in self._pieces(self._row):
                piece.copy_(parameter.detach())
        own = self._row[self.lo : self.hi]
        self._work = self._transport.all_gather_async(own, self._row, self.counts)

    def finish_gathering_values(self) -> None:
        """Waits until the parameters are whole and equal on all ranks."""
        assert self._work is not None
        assert self._row is not None
        self._work.wait()
        if len(self.parameters) > 1:
            for parameter, piece in self._pieces(self._row):
                parameter.detach().copy_(piece)
        self._row = self._work = None


def make_buckets(
    parameters: Sequence[nn.Parameter],
    transport: Transport,
    is_scattered: Callable[[nn.Parameter], bool],
) -> list[Bucket]:
    """Buckets, in the order in which backward completes them: last parameters first.

    Small parameters share buckets, even across large ones, which travel alone.
    """
    made: list[tuple[int, bool, list[nn.Parameter]]] = []  # when complete, kind, contents
    open_: dict[tuple[object, ...], tuple[list[nn.Parameter], list[int]]] = {}
    for index, parameter in enumerate(reversed(parameters)):
        nbytes = parameter.numel() * parameter.element_size()
        scattered = is_scattered(parameter) and is_dense(parameter)
        if nbytes >= ALONE_BYTES:
            made.append((index, scattered, [parameter]))
            continue
        kind = (parameter.dtype, parameter.device, scattered)
        contents, state = open_.get(kind, ([], [0, 0]))
        if contents and state[0] + nbytes > BUCKET_BYTES:
            made.append((state[1], scattered, contents))
            contents, state = [], [0, 0]
        contents.append(parameter)
        open_[kind] = contents, [state[0] + nbytes, index]
    made += [(state[1], bool(kind[2]), contents) for kind, (contents, state) in open_.items()]
    made.sort(key=lambda each: each[0])
    return [
        ScatteredBucket(contents, transport) if scattered else Bucket(contents)
        for _, scattered, contents in made
    ]


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What this rank has accumulated, if the gradient is not the mean of all yet."""
    grad = parameter.grad
    return grad.local() if isinstance(grad, ScatteredGradient) else grad


def divide(row: Tensor, ranks: int) -> None:
    """Sum to mean, in place."""
    if ranks & (ranks - 1):
        row.div_(ranks)
    else:
        row.mul_(1 / ranks)  # the same bits, as a power of two has an exact inverse


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one interval of memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def memory_of(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as one row, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def shaped_like(row: Tensor, parameter: Tensor) -> Tensor:
    """A row in the order of a parameter's memory, in its shape; in index order if it has gaps."""
    if is_dense(parameter):
        return row.as_strided(parameter.shape, parameter.stride())
    return row.view(parameter.shape)


def in_memory_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The elements of a tensor as one row, in the order of a dense parameter's memory."""
    if not _in_order_of(tensor, parameter):
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return memory_of(tensor)


def _in_order_of(tensor: Tensor, parameter: Tensor) -> bool:
    return is_dense(tensor) and (
        tensor.stride() == parameter.stride()
        or (tensor.is_contiguous() and parameter.is_contiguous())
    )
