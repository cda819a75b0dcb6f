"""Flags that the ranks exchange at the end of a backward pass: the gradients that exist."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pydist.errors import NotSupported
from pydist.exchange.adjoints import mean_ranks
from pydist.gradients.forms.stateful import SteppedForm
from pydist.gradients.leaf import NEW, OLD

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.lane import Lane
    from pydist.gradients.leaf import Leaf
    from pydist.mesh import Mesh

# A parameter that is frozen for this many consecutive backward passes is no longer sent. Networks
# that are frozen and unfrozen alternately (GANs) keep their places, and so do the parameters of a
# form that counts steps or keeps state.
_IDLE_PASSES = 3
FROZEN, SHOWN = 1, 2
"""A parameter that stores no gradient, and one whose hooks still see arriving gradients."""
_COUNTED = 0, 1, 1 << 31
"""The term of each flag in a sum over ranks."""


class Flags:
    """Exchanges the flags of a backward pass: the highest of each, and whether the ranks agree.

    This is one all-reduce of a few integers in host memory: a sum, as the consistency checks need,
    in which a flag of 2 counts more than all flags of 1 together. A captured step sends it, but its
    replays do not: the captured step must be like the one before.
    """

    def __init__(self) -> None:
        self._own: list[int] = []
        self._sent = self._sums = array("q", [0])  # the proof and the flags
        self._any: list[int] = []

    def exchange(
        self, world: Transport, own: list[int], proof: int, *, captured: bool
    ) -> tuple[list[int], int]:
        """Returns the largest of each flag over all ranks. Collective.

        Args:
            world: connects all ranks.
            own: the flags of this rank: 0, 1 or 2.
            proof: this rank's term of a sum that is 0 if the ranks agree.
            captured: whether the step is captured as a CUDA graph.

        Returns:
            The largest flags, and the sum of the proofs.

        Raises:
            NotSupported: a captured step has other gradients than the one before.
        """
        if own != self._own:
            self._own = own
            self._sent = array("q", [0, *(_COUNTED[flag] for flag in own)])
        sums = self._sent[:]
        sums[0] = proof
        world.all_reduce(torch.frombuffer(sums, dtype=torch.int64))
        total, sums[0] = sums[0], 0
        if sums != self._sums:
            if captured:
                raise NotSupported("a CUDA graph of a step with other gradients than the last one")
            self._sums = sums
            self._any = [2 if n >= _COUNTED[2] else min(n, 1) for n in sums[1:]]
        return self._any, total


def own_flags(
    lanes: Sequence[Lane], news: bool, unused: Container[Leaf] = ()
) -> tuple[list[int], list[list[int]]]:
    """Returns this rank's flags: one for news, one for each lane, two for each member.

    Args:
        lanes: all lanes.
        news: whether a parameter without a lane has a gradient.
        unused: frozen members at which a gradient has arrived.

    Returns:
        The flags, and for each lane the leaves that no longer need a place.
    """
    flags = [0, *(int(lane.wanted) for lane in lanes)]
    frozen: list[int] = []
    proposals = []
    for lane in lanes:
        proposal = []
        for index, leaf in enumerate(lane.leaves):
            if leaf.fired and not leaf.paused:
                flags.append(NEW)
                frozen.append(0)
                leaf.idle = 0
                continue
            parameter = leaf.parameter()
            if parameter is None:
                flags.append(0)
                frozen.append(0)
                proposal.append(index)
                continue
            exists = lane.bucket_of[leaf].has_gradient(leaf)
            # A stepped form keeps nothing of an assigned gradient yet.
            is_new = isinstance(lane.form, SteppedForm) and leaf.is_assigned(parameter)
            if exists and (leaf.fired or is_new):
                flags.append(NEW)
                leaf.idle = 0
                frozen.append(0)
                continue
            leaf.fired = False  # or zero_grad() was called since
            flags.append(OLD if exists else 0)
            trains = parameter.requires_grad
            is_shown = leaf in unused and leaf.shows_gradients
            frozen.append(0 if trains else SHOWN if is_shown else FROZEN)
            leaf.idle = 0 if trains else leaf.idle + lane.touched
            if leaf.idle >= _IDLE_PASSES and not isinstance(lane.form, SteppedForm):
                proposal.append(index)
            if leaf.has_hooks:
                leaf.remember_base(parameter)
        proposals.append(proposal)
    flags[0] = int(news or proposals != [lane.dropped for lane in lanes])
    return flags + frozen, proposals


class Agreement(NamedTuple):
    """What all ranks know of the gradients of a backward pass, from the flags of all."""

    news: bool
    """Whether a rank has a gradient of a parameter without a lane, or other leaves to drop."""
    used: list[Lane]
    """The lanes with gradients to reduce."""
    flags: dict[Leaf, int]
    """0, `OLD` or `NEW` for each member: the highest of all ranks."""
    frozen: dict[Leaf, int]
    """`FROZEN` or `SHOWN` for the members that are frozen on a rank."""


def read_flags(lanes: Sequence[Lane], anywhere: Sequence[int]) -> Agreement:
    """Reads the flags of all ranks, which have the order of `own_flags`."""
    members = [leaf for lane in lanes for leaf in lane.leaves]
    first = 1 + len(lanes)
    last = first + len(members)
    used = [lane for lane, flag in zip(lanes, anywhere[1:first], strict=True) if flag]
    flags = dict(zip(members, anywhere[first:last], strict=True))
    frozen = {leaf: f for leaf, f in zip(members, anywhere[last:], strict=True) if f}
    return Agreement(bool(anywhere[0]), used, flags, frozen)


def show_unused(mesh: Mesh, agreed: Agreement, unused: dict[Leaf, Tensor]) -> None:
    """Forms the means that hooks of any rank need. Collective.

    Args:
        mesh: the mesh.
        agreed: what all ranks know.
        unused: gradients that arrived at frozen members; replaced by their means.
    """
    for leaf, flag in agreed.frozen.items():
        if flag == SHOWN:
            arrived = unused.get(leaf)
            if arrived is None:  # at another rank only
                arrived = leaf.kind.zeros()
            unused[leaf] = mean_ranks(arrived, mesh, leaf.axes, "gradients")


def refuse_frozen(agreed: Agreement) -> None:
    """Raises, on all ranks, for a parameter that some ranks train and others have frozen.

    Raises:
        NotSupported: such a parameter exists.
    """
    for leaf in agreed.frozen:
        if agreed.flags[leaf] == NEW:
            raise NotSupported(
                f"the parameter {leaf.name} is frozen (requires_grad=False) on some ranks and "
                "trained on others: freeze the same parameters on all"
            )
