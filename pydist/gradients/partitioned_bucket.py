"""Buckets whose gradients and optimizer step are partitioned over the ranks (ZeRO-1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pydist.comm.consensus import any_rank
from pydist.gradients.bucket import Bucket, Remnant, fits, pending_gradient
from pydist.gradients.leaf import NEW
from pydist.gradients.partitioned import GradientSet, PartitionedGradient
from pydist.gradients.rows import in_order_of, memory_of

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.forms.form import DenseForm
    from pydist.gradients.leaf import Leaf

# Parts begin at multiples of cache lines and vectors, so that optimizers handle them like full
# parameters.
_ALIGNMENT = 16


class ParameterPartition(NamedTuple):
    """Parts into which a parameter is divided, in elements of its memory."""

    start: int
    stop: int
    """This rank's part."""
    counts: list[int]
    """Elements on each rank, in the order of ranks and of memory."""
    offset: int
    """The parameter's first element in its bucket."""


class PartitionedBucket(Bucket):
    """A bucket whose gradients and optimizer step are partitioned over the ranks (ZeRO-1).

    The bucket is one row of elements; each rank owns an interval, and keeps only its mean. The
    accumulated gradient is freed as soon as the other ranks have received their parts. Another
    backward accumulates from zero, and its mean is added.

    Attributes:
        counts: elements that each rank owns, in the order of ranks.
        kept: gradients of earlier backwards while one is running, by the id of the parameter.
    """

    def __init__(
        self, leaves: Sequence[Leaf], form: DenseForm, transport: Transport, holders: Transport
    ) -> None:
        super().__init__(leaves, form)
        self._dense = form
        elements = self._elements()
        chunk = -(-elements // (transport.size * _ALIGNMENT)) * _ALIGNMENT
        points = [min(rank * chunk, elements) for rank in range(transport.size + 1)]
        self._points = points
        self.transport, self._holders = transport, holders
        self.counts = [b - a for a, b in itertools.pairwise(points)]
        self._lo, self._hi = points[transport.rank], points[transport.rank + 1]
        self.kept: dict[int, PartitionedGradient] = {}
        self._own: Tensor | None = None
        self._released: set[int] = set()

    def parts(self) -> Iterator[tuple[Leaf, ParameterPartition]]:
        """Yields each parameter and its parts."""
        first = 0
        for leaf in self.leaves:
            last = first + leaf.numel
            cuts = [min(max(p, first), last) - first for p in self._points]
            rank = self.transport.rank
            counts = [b - a for a, b in itertools.pairwise(cuts)]
            yield leaf, ParameterPartition(cuts[rank], cuts[rank + 1], counts, first)
            first = last

    def start(self) -> None:
        """Starts the reduce-scatter of the gradients."""
        self._row = self._alone()
        if self._row is None:
            self._row = self._packed()
        self._send(self._row)

    def start_blank(self) -> None:
        """Sends zeros, as other ranks have begun their message; see `Bucket.start_blank`."""
        kind = self.leaves[0].kind
        self._row = torch.zeros(self._elements(), dtype=kind.dtype, device=kind.device)
        self._send(self._row)

    def release(self) -> bool:
        """Frees full gradients that have reached their owners; see `Bucket.release`."""
        if self._work is None or not self._work.done():
            return False
        self._work.wait()  # returns immediately, and frees the memory
        self._row = None
        for leaf in self.leaves:
            parameter = leaf.parameter()
            grad = None if parameter is None else parameter.grad
            if parameter is None or grad is None or isinstance(grad, PartitionedGradient):
                continue
            if not leaf.keeps_graph and fits(leaf, grad):
                parameter.grad = None
                self._released.add(leaf.key)
        return True

    def has_gradient(self, leaf: Leaf) -> bool:
        """Returns whether this rank has or had the gradient; see `Bucket.has_gradient`."""
        return leaf.key in self._released or super().has_gradient(leaf)

    def finish(self, gradient_set: GradientSet, flag: Callable[[Leaf], int]) -> None:
        """Replaces the gradients by placeholders for the mean."""
        assert self._own is not None
        for leaf, part in self.parts():
            parameter = leaf.parameter()
            if parameter is None:
                continue
            grad = parameter.grad
            if leaf.keeps_graph:
                continue
            earlier = self.kept.get(leaf.key)
            if earlier is None and isinstance(grad, PartitionedGradient):
                earlier = grad
            if earlier is None and not flag(leaf):
                continue
            piece = self._own[self._place(part)]
            if earlier is not None:
                piece = piece.add_(earlier.piece) if flag(leaf) == NEW else earlier.piece
            parameter.grad = PartitionedGradient(parameter, piece, gradient_set)
        self._forget()

    def interrupt(self) -> None:
        """Puts earlier gradients back, which the caller may clear; see `Bucket.interrupt`."""
        gradient_set = GradientSet(self._holders)
        for leaf, part in self.parts():
            parameter = leaf.parameter()
            if parameter is None:
                continue
            self.put_back(parameter)
            grad = parameter.grad
            if self._work is None or leaf.keeps_graph:
                continue
            if grad is None and leaf.key not in self._released:
                continue
            if not isinstance(grad, PartitionedGradient):
                count = part.stop - part.start
                kind = leaf.kind
                zeros = torch.zeros(count, dtype=kind.dtype, device=kind.device)
                grad = parameter.grad = PartitionedGradient(parameter, zeros, gradient_set)
            elif grad.pending is None and leaf.key not in self._released:
                continue
            grad.pending, grad.arriving = None, True
        self._released.clear()

    def remnant(self, leaf: Leaf) -> Remnant:
        """Returns the location of this rank's part of a gradient; see `Bucket.remnant`."""
        parameter = leaf.parameter()
        grad = None if parameter is None else parameter.grad
        if not isinstance(grad, PartitionedGradient):
            return super().remnant(leaf)
        if grad.arriving:
            return Remnant.SENT
        return Remnant.NONE if grad.pending is None else Remnant.HERE

    def resume(self, gradient_set: GradientSet, remnants: Mapping[Leaf, Remnant]) -> None:
        """Adds the mean of an interrupted message to the gradients; see `Bucket.resume`."""
        if self._work is None:
            return
        self._work.wait()
        assert self._own is not None
        for leaf, part in self.parts():
            parameter = leaf.parameter()
            if parameter is None or parameter.grad is None or remnants[leaf] is not Remnant.SENT:
                continue
            piece, pending = self._own[self._place(part)], pending_gradient(parameter)
            if isinstance(parameter.grad, PartitionedGradient):
                piece += parameter.grad.piece
            parameter.grad = PartitionedGradient(parameter, piece, gradient_set)
            parameter.grad.pending = pending
        self._forget()

    def abandon(self) -> None:
        """Drops the message and the gradients in it; see `Bucket.abandon`."""
        self._forget()

    def set_aside(self, parameter: Tensor) -> None:
        """Sets a partitioned gradient aside, if there is one, so that a backward accumulates."""
        grad = parameter.grad
        if isinstance(grad, PartitionedGradient):
            self.kept[id(parameter)] = grad
            parameter.grad, grad.pending = grad.pending, None

    def put_back(self, parameter: Tensor) -> None:
        """Restores the gradient set aside, with the newly accumulated one as pending."""
        earlier = self.kept.pop(id(parameter), None)
        if earlier is not None:
            parameter.grad, earlier.pending = earlier, parameter.grad

    def gather_gradients(self) -> None:
        """Gathers the full gradients on all ranks. Collective."""
        found = {leaf.key: leaf.parameter() for leaf in self.leaves}
        mine = any(
            p is not None and isinstance(p.grad, PartitionedGradient) for p in found.values()
        )
        # One rank alone may keep a replaced parameter.
        if not any_rank(self.transport, mine):
            return
        kind = self.leaves[0].kind
        row = torch.zeros(sum(self.counts), dtype=kind.dtype, device=kind.device)
        own = row[self._lo : self._hi]
        for leaf, part in self.parts():
            parameter = found[leaf.key]
            if parameter is not None and isinstance(parameter.grad, PartitionedGradient):
                own[self._place(part)] = parameter.grad.piece
        self.transport.all_gather_async(own, row, self.counts).wait()
        alone = len(self.leaves) == 1
        for leaf, piece in zip(self.leaves, self._places_in(row), strict=True):
            parameter = found[leaf.key]
            grad = None if parameter is None else parameter.grad
            if parameter is not None and isinstance(grad, PartitionedGradient):
                parameter.grad = piece if alone else piece.clone()
                if grad.pending is not None:
                    parameter.grad += grad.pending

    def _place(self, part: ParameterPartition) -> slice:
        """Returns the position of a parameter's part in this rank's interval."""
        start = max(part.offset + part.start - self._lo, 0)
        return slice(start, start + part.stop - part.start)

    def _forget(self) -> None:
        self._row = self._work = self._own = None
        self._released.clear()
        self.kept.clear()

    def start_gathering_values(self) -> None:
        """Starts the all-gather of the parameters' values."""
        first = self.leaves[0].parameter()
        if len(self.leaves) == 1 and first is not None:
            self._row = memory_of(first.detach())
        else:
            self._row = self._packed_values()
        own = self._row[self._lo : self._hi]
        self._work = self.transport.all_gather_async(own, self._row, self.counts)

    def finish_gathering_values(self, changed: Collection[int]) -> None:
        """Waits until the changed parameters, given by ids, are complete and equal on all ranks."""
        assert self._work is not None
        assert self._row is not None
        self._work.wait()
        for leaf, piece in zip(self.leaves, self._places_in(self._row), strict=True):
            parameter = leaf.parameter()
            if parameter is not None and leaf.key in changed and parameter.grad is not None:
                if len(self.leaves) > 1:
                    parameter.detach().copy_(piece)
                # Written without torch: saved values must become stale for backward.
                torch.autograd.graph.increment_version(parameter)
        self._row = self._work = None

    def _send(self, row: Tensor) -> None:
        own = self.counts[self.transport.rank]
        self._own = torch.empty(own, dtype=row.dtype, device=row.device)
        self._work = self._dense.scatter(row, self._own, self.counts)

    def _alone(self) -> Tensor | None:
        """Returns the only gradient's memory, if it has the order of the parameter's."""
        first = self.leaves[0].parameter() if len(self.leaves) == 1 else None
        grad = None if first is None else pending_gradient(first)
        if first is None or grad is None or not fits(self.leaves[0], grad):
            return None
        return memory_of(grad.detach()) if in_order_of(grad, first) else None

    def _packed_values(self) -> Tensor:
        kind = self.leaves[0].kind
        row = torch.zeros(sum(self.counts), dtype=kind.dtype, device=kind.device)
        for leaf, piece in zip(self.leaves, self._places_in(row), strict=True):
            parameter = leaf.parameter()
            if parameter is not None:
                piece.copy_(parameter.detach())
        return row
