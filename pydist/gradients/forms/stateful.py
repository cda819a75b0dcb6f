"""Bases of forms that depend on earlier steps: on their number, or on what was not sent in them.

Each rank of a sample group is the owner of some parameters: it gets the group's mean of their
gradients, exchanges a compressed form with the owners in the other groups, and has the state. So a
group computes and stores everything once.

State changes when a backward pass ends, for all parameters of a lane or for none: a pass with an
infinite or NaN gradient, whose step a `GradScaler` skips, leaves it as it was. All ranks see the
same gradients after the exchange, so they decide the same. State has no loss scale.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.comm.interface.reduction import WIDER, divide_
from pydist.errors import UsageError
from pydist.gradients.forms.levels import Levels
from pydist.gradients.leaf import pieces_of

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Work
    from pydist.gradients.forms.messages import Messages
    from pydist.gradients.leaf import Leaf

LeafState = dict[str, Tensor]
"""The state of one parameter, by the name of the quantity."""


class SteppedForm(Levels):
    """Base of forms that count steps. Their parameters stay in their lane, and are not replaced.

    Attributes:
        steps: backward passes so far, as the form counts them; equal on all ranks.
    """

    def __init__(self, within: Messages, between: Messages) -> None:
        super().__init__(within, between)
        self.steps = 0
        self._leaves: list[Leaf] = []  # of the running pass

    def conclude(self, kept: Callable[[Leaf], bool]) -> None:
        """Counts a step if any parameter received its mean; see `Form.conclude`."""
        self.steps += any(kept(leaf) for leaf in self._leaves)
        self.abandon()

    def restart(self, steps: int) -> None:
        """Continues after a number of steps, with parameters that are equal in all groups."""
        self.steps = steps

    def abandon(self) -> None:
        """Forgets the rows and parameters of the pass; see `Form.abandon`."""
        super().abandon()
        self._leaves.clear()

    def _reduce(self, row: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        yield from super()._reduce(row, leaves)
        self._leaves += leaves


class StatefulForm(SteppedForm):
    """Base of forms with state, which is keyed by the names of parameters.

    A step is a backward pass that has changed the state.

    Attributes:
        shared: names of the quantities that are equal in all sample groups; others are per group.
        scale: the factor of the loss, and so of the gradients, in the running pass.
        state: of the parameters that this rank owns.
        shapes: of all parameters.
        dtypes: of the state of each; fp32 for narrower parameters.
    """

    shared: frozenset[str] = frozenset()

    def __init__(
        self, within: Messages, between: Messages, leaves: Iterable[Leaf], seed: int
    ) -> None:
        """Chooses the owners.

        Args:
            within: the sample group.
            between: the ranks with one index in all sample groups.
            leaves: the parameters of the lane, in one order on all ranks.
            seed: of random numbers, equal on all ranks.
        """
        super().__init__(within, between)
        self.scale, self._seed = 1.0, seed
        self.state: dict[str, LeafState] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._devices: dict[str, torch.device] = {}
        self._owner: dict[str, int] = {}
        self._changed: dict[str, LeafState] = {}  # by the running pass
        self._norms: list[Tensor] = []  # of its results
        load = [0] * within.size
        for leaf in sorted(leaves, key=lambda each: -each.numel):  # stable: the same everywhere
            owner = self._owner[leaf.name] = load.index(min(load))
            load[owner] += leaf.numel
            self.shapes[leaf.name] = leaf.kind.shape
            self.dtypes[leaf.name] = WIDER.get(leaf.kind.dtype, leaf.kind.dtype)
            self._devices[leaf.name] = leaf.kind.device

    def arrange(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Sorts the parameters by the rank that owns their state; see `Form.arrange`."""
        return sorted(leaves, key=lambda each: self._owner[each.name])

    def owner_of(self, name: str) -> int:
        """Returns the index in the sample group of the rank that has a parameter's state."""
        return self._owner[name]

    def conclude(self, kept: Callable[[Leaf], bool]) -> None:
        """Stores the changed state if all results are finite; see `Form.conclude`."""
        found = [leaf.name for leaf in self._leaves if kept(leaf)]
        if found and all(bool(torch.isfinite(norm)) for norm in self._norms):
            self.steps += 1
            self.state.update({n: self._changed[n] for n in found if n in self._changed})
        self.abandon()

    def restart(self, steps: int) -> None:
        """Continues without what was not sent; see `SteppedForm.restart`."""
        super().restart(steps)
        self.state.clear()

    def abandon(self) -> None:
        """Drops the changes of the pass; see `Form.abandon`."""
        super().abandon()
        self._changed.clear()
        self._norms.clear()

    # -- checkpoints ------------------------------------------------------------------------

    @abstractmethod
    def quantities(self, name: str) -> Mapping[str, torch.Size]:
        """Returns the shapes of the state that a parameter has from its first step on."""

    def accept(self, name: str, saved: Mapping[str, Tensor], group: int) -> None:
        """Takes a parameter's saved state.

        Args:
            name: of the parameter.
            saved: by quantity; [groups, ...], or as it is if all groups share it.
            group: the index of this rank's sample group.

        Raises:
            UsageError: it has other shapes.
        """
        expected, found = self.quantities(name), {}
        if saved.keys() != expected.keys():
            raise UsageError(
                f"the state of gradients of {name} has {', '.join(saved)}, and {self.name!r} needs "
                f"{', '.join(expected)}"
            )
        for quantity, value in saved.items():
            own = value
            if quantity not in self.shared:
                groups = value.shape[0] if value.dim() else 0
                # Another number of groups: the mean is what all of them have not sent yet.
                own = value[group] if groups == self.between.size else value.mean(0)
            if own.shape != expected[quantity]:
                raise UsageError(
                    f"the state of gradients of {name} has {quantity} of shape {list(own.shape)}, "
                    f"and this run needs {list(expected[quantity])}"
                )
            found[quantity] = own.to(self._devices[name], self.dtypes[name], copy=True)
        if self._owner[name] == self.within.rank:
            self.state[name] = found

    # -- a reduction ------------------------------------------------------------------------

    def _counts(self, row: Tensor, leaves: Sequence[Leaf]) -> list[int]:
        del row
        counts = [0] * self.within.size
        for leaf in leaves:
            counts[self._owner[leaf.name]] += leaf.numel
        return counts

    def _own(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        return [leaf for leaf in leaves if self._owner[leaf.name] == self.within.rank]

    def _reduce(self, row: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        yield from super()._reduce(row, leaves)
        self._norms.append(torch.linalg.vector_norm(row, torch.inf) if row.numel() else row.sum())

    def _exchange(self, part: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        """Sums small parameters as they are, and compresses the others."""
        wide = part.to(WIDER.get(part.dtype, part.dtype))
        pieces = list(zip(leaves, pieces_of(wide, leaves), strict=True))
        sparse = [(leaf, piece) for leaf, piece in pieces if self._compresses(leaf)]
        plain = [(leaf, piece) for leaf, piece in pieces if not self._compresses(leaf)]
        yield from self._exchange_both(wide, sparse, plain)
        if wide is not part:
            part.copy_(wide)

    @abstractmethod
    def _compresses(self, leaf: Leaf) -> bool:
        """Returns whether a parameter's gradient is compressed."""

    @abstractmethod
    def _exchange_both(
        self,
        part: Tensor,
        compressed: Sequence[tuple[Leaf, Tensor]],
        plain: Sequence[tuple[Leaf, Tensor]],
    ) -> Iterator[Work]:
        """Makes pieces of a row means over the groups, in place."""

    def _average(self, part: Tensor) -> Iterator[Work]:
        yield self.between.all_reduce(part)
        divide_(part, self.between.size)

    def _drawn(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Draws normal numbers that depend on the seed and a parameter's name alone."""
        key = zlib.crc32(f"{self._seed} {name}".encode())
        generator = torch.Generator().manual_seed(key)
        drawn = torch.randn(*shape, generator=generator, dtype=like.dtype)
        return drawn.to(like.device)


def joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Returns a new row with the elements of tensors, one after the other."""
    if not tensors:
        return torch.empty(0, dtype=like.dtype, device=like.device)
    return torch.cat([each.reshape(-1) for each in tensors])


def divided(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns views of a row in the given shapes, one after the other; the inverse of `joined`."""
    found, start = [], 0
    for shape in shapes:
        size = torch.Size(shape)
        found.append(row[start : start + size.numel()].view(size))
        start += size.numel()
    return found
