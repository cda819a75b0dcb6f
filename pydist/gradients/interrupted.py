"""Gradients after a backward that raised, whose error a script may catch.

Accumulated gradients stay, as in torch, and are reduced together with the next backward's, as
after `no_sync`. Some messages may already be in flight, and other ranks may have sent fewer. So
at first no rank waits. The next backward on all ranks completes the messages (`settle`), and adds
their means to the gradients that the script has not cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pydist.errors import NotSupported
from pydist.gradients.bucket import Remnant

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.lane import Lane
    from pydist.gradients.leaf import Leaf


def interrupt(lanes: Iterable[Lane], added: Iterable[Leaf]) -> None:
    """Records that a backward has raised on this rank.

    Args:
        lanes: all lanes.
        added: the parameters to whose gradients it has added.
    """
    added = set(added)
    for lane in lanes:
        lane.interrupt()
        lane.pending |= not added.isdisjoint(lane.leaves)
    for leaf in added:
        leaf.partial, parameter = True, leaf.parameter()
        if parameter is not None:
            leaf.remember_pause(parameter)


@torch.no_grad()
def settle(world: Transport, lanes: Sequence[Lane]) -> None:
    """Completes the messages of a backward that raised on all ranks. Collective.

    Raises:
        NotSupported: ranks have added to different gradients, or a script has changed one whose
            message was in flight; on all ranks. Cleared gradients are correct.
    """
    leaves = [leaf for lane in lanes for leaf in lane.leaves]
    own = [remnant for lane in lanes for remnant in lane.remnants()]
    added = [e.partial and r is not Remnant.NONE for e, r in zip(leaves, own, strict=True)]
    row = [*(lane.started for lane in lanes), *own, *added, *(not each for each in added)]
    most = torch.tensor(row, dtype=torch.int64, device="cpu")
    if row:
        world.all_reduce(most, "max")
    found = most.tolist()
    started, last = found[: len(lanes)], found[len(lanes) :]
    count = len(leaves)
    remnants = {leaf: Remnant(each) for leaf, each in zip(leaves, last[:count], strict=True)}
    for lane, buckets in zip(lanes, started, strict=True):
        lane.resume(buckets, remnants)
    partly = (a and b for a, b in zip(last[count : 2 * count], last[2 * count :], strict=True))
    for leaf, differs in zip(leaves, partly, strict=True):
        if differs or remnants[leaf] is Remnant.CHANGED:
            how = "was added to on some ranks only by" if differs else "was changed after"
            raise NotSupported(
                f"the gradient of the parameter {leaf.name} {how} a backward() that raised: call "
                "zero_grad() on all ranks before the next backward()"
            )
    for leaf, remnant in zip(leaves, own, strict=True):
        if leaf.partial and remnant is Remnant.NONE:
            leaf.forget()
        leaf.partial = False
