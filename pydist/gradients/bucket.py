"""A bucket: parameters whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.gradients.forms.stateful import SteppedForm
from pydist.gradients.leaf import NEW, OLD, pieces_of
from pydist.gradients.partitioned import GradientSet, PartitionedGradient
from pydist.gradients.rows import in_order_of, memory_of

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Work
    from pydist.gradients.forms.form import Form
    from pydist.gradients.leaf import Leaf


class Remnant(IntEnum):
    """The location of a rank's part of a gradient after a backward that raised."""

    NONE = 0
    """Nowhere: the part does not exist, or the script has cleared it since."""
    HERE = 1
    """In its own memory."""
    SENT = 2
    """In a message that was in flight."""
    CHANGED = 3
    """In a message, and the script has changed the gradient since."""


class Bucket:
    """Parameters whose gradients are reduced together, as the lane's form says.

    The layout follows `Leaf.kind`, even if parameters change: a freed or changed parameter counts
    as zero, so the message has the same layout on all ranks.
    """

    def __init__(self, leaves: Sequence[Leaf], form: Form) -> None:
        self.leaves, self._form = leaves, form
        self.expected = set(leaves)
        self._flat: Tensor | None = None
        self._places: list[Tensor] = []  # of the parameters in `_flat`
        self._row: Tensor | None = None
        self._work: Work | None = None
        self._sent: dict[int, tuple[Tensor, int]] = {}  # see `interrupt`

    def start(self) -> None:
        """Starts the sum of the gradients; a missing one counts as zero."""
        self._row = self._own_memory() if len(self.leaves) == 1 else None
        if self._row is None:
            self._row = self._packed()
        self._work = self._form.start(self._row, self.leaves)

    def start_blank(self) -> None:
        """Sends the same message with zeros, as other ranks have begun theirs."""
        kind = self.leaves[0].kind
        self._row = torch.zeros(self._elements(), dtype=kind.dtype, device=kind.device)
        self._work = self._form.start(self._row, self.leaves)

    def wait(self) -> None:
        """Waits until the message has arrived everywhere; before `finish`."""
        assert self._work is not None
        self._work.wait()

    def finish(self, gradient_set: GradientSet, flag: Callable[[Leaf], int]) -> None:
        """Stores the means in the gradients.

        An older one that is the mean already is left alone: stages see by a change that the mesh
        has contributed. So are all older ones where the form keeps what it has not sent.

        Args:
            gradient_set: collects gradients that stay partitioned.
            flag: returns the parameter's flag: 0, `OLD` or `NEW`.
        """
        assert self._row is not None
        self._form.complete(self._row)
        keeps_rest = isinstance(self._form, SteppedForm)
        grads, means = [], []
        for leaf, piece in zip(self.leaves, self._places_in(self._row), strict=True):
            parameter = leaf.parameter()
            if parameter is None or (keeps_rest and flag(leaf) != NEW):
                continue
            grad = parameter.grad
            if grad is None:
                if flag(leaf) and leaf.describes(parameter):
                    parameter.grad = piece.clone()
            elif flag(leaf) != NEW and leaf.has_mean(grad):
                continue
            elif fits(leaf, grad) and grad.data_ptr() != piece.data_ptr():
                # A gradient with a graph (create_graph) keeps it. If it was fully reduced before,
                # it is its own mean; but a pass without a graph may have added a part.
                grads.append(grad)
                means.append(piece)
        copy_all(grads, means)
        first = self.leaves[0]
        if len(self.leaves) == 1 and (self._row is not self._flat or flag(first) == OLD):
            self._flat, self._places = None, []  # large, and the next pass may need none
        self._row = self._work = None

    def set_aside(self, parameter: Tensor) -> None:
        """Prepares a gradient for accumulation; an ordinary one needs nothing."""

    def put_back(self, parameter: Tensor) -> None:
        """Undoes `set_aside` after a backward that reduces nothing; does nothing here."""

    def release(self) -> bool:
        """Frees gradients that have reached other ranks; returns whether this is complete."""
        return True

    def has_gradient(self, leaf: Leaf) -> bool:
        """Returns whether this rank has a gradient of the parameter."""
        parameter = leaf.parameter()
        return parameter is not None and parameter.grad is not None

    def interrupt(self) -> None:
        """Separates the gradients from a sent message, after a backward that raised.

        The gradients are in the message, and NaN here until `resume` restores them. Other ranks may
        not have sent theirs, so nothing waits for the message.
        """
        if self._work is None:
            return
        for leaf in self.leaves:
            parameter = leaf.parameter()
            grad = None if parameter is None else parameter.grad
            if parameter is None or grad is None or not fits(leaf, grad):
                continue
            parameter.grad = torch.full_like(grad, torch.nan)
            self._sent[leaf.key] = parameter.grad, parameter.grad._version

    def remnant(self, leaf: Leaf) -> Remnant:
        """Returns the location of this rank's part of a gradient, after a backward that raised."""
        parameter = leaf.parameter()
        grad = None if parameter is None else parameter.grad
        if parameter is None or grad is None or leaf.is_cleared(parameter):
            return Remnant.NONE
        sent, version = self._sent.get(leaf.key, (None, 0))
        if sent is not grad:
            return Remnant.HERE
        return Remnant.SENT if grad._version == version else Remnant.CHANGED

    def resume(self, gradient_set: GradientSet, remnants: Mapping[Leaf, Remnant]) -> None:
        """Waits for the message of an interrupted backward, and adds its mean to the gradients.

        Args:
            gradient_set: collects gradients that stay partitioned.
            remnants: the highest of all ranks, in the order of `Remnant`.
        """
        sent, changed = self._sent, Remnant.CHANGED
        self._sent = {
            e.key: sent[e.key] for e in self.leaves if e.key in sent and remnants[e] is changed
        }
        if self._work is None:
            return
        self._work.wait()
        assert self._row is not None
        self._form.complete(self._row)
        for leaf, piece in zip(self.leaves, self._places_in(self._row), strict=True):
            parameter = leaf.parameter()
            grad = None if parameter is None else parameter.grad
            if parameter is None or grad is None or remnants[leaf] is not Remnant.SENT:
                continue
            if sent.get(leaf.key, (None,))[0] is grad:
                grad.copy_(piece)
            else:  # this rank had not sent its message: its own part is here
                grad.add_(piece)
            leaf.remember_pause(parameter)
        self._row = self._work = None

    def abandon(self) -> None:
        """Drops the message of a CUDA graph whose capture failed, which never runs."""
        self._row = self._work = None

    def _own_memory(self) -> Tensor | None:
        """Returns the memory of the only gradient, if it can be overwritten in place; else None."""
        parameter = self.leaves[0].parameter()
        grad = None if parameter is None else parameter.grad
        if grad is None or parameter is None or not fits(self.leaves[0], grad):
            return None
        if not self.leaves[0].fired:  # an older one stays, unless another rank has added to it
            return None
        if not in_order_of(grad, parameter):
            return None
        # Backward may have stored a gradient that shares memory with another one.
        storage = grad.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > 2:  # the gradient's, and `storage`'s
            return None
        return memory_of(grad)

    def _packed(self) -> Tensor:
        """Copies the gradients into one row, and returns it."""
        if self._flat is None:
            kind = self.leaves[0].kind
            self._flat = torch.empty(self._elements(), dtype=kind.dtype, device=kind.device)
            self._places = self._places_in(self._flat)
        grads, places = [], []
        for leaf, place in zip(self.leaves, self._places, strict=True):
            parameter = leaf.parameter()
            grad = None if parameter is None else pending_gradient(parameter)
            if grad is None or not fits(leaf, grad):
                place.zero_()
            else:
                grads.append(grad)
                places.append(place)
        copy_all(places, grads)
        return self._flat

    def _elements(self) -> int:
        return sum(leaf.numel for leaf in self.leaves)

    def _places_in(self, row: Tensor) -> list[Tensor]:
        """Returns views of the parameters' places in a row that holds all of them."""
        if row is self._flat and self._places:
            return self._places
        return pieces_of(row, self.leaves)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors in one call."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def pending_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the gradient that this rank has accumulated and that is not reduced yet."""
    grad = parameter.grad
    return grad.pending if isinstance(grad, PartitionedGradient) else grad


def fits(leaf: Leaf, grad: Tensor) -> bool:
    """Returns whether a gradient fits into the message: not if the parameter changed since."""
    return grad.dtype == leaf.kind.dtype and grad.device == leaf.kind.device
