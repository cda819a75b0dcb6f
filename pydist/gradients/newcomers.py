"""Compares ranks' new members of the reducer, and their plain tensors used as parameters."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pydist._loader import native
from pydist.errors import UsageError
from pydist.grid import AXES

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.lane import Lane
    from pydist.gradients.leaf import Leaf


_HINT = "give it to pydist.parallelize, on all ranks, as a module or a part of one"


def compare_newcomers(
    world: Transport,
    newcomers: Sequence[Leaf],
    lanes: Sequence[Lane],
    proposals: list[list[int]],
    frozen: Container[Leaf],
    found: Sequence[Leaf] = (),
) -> list[set[int]]:
    """Compares parameters that are new to the reducer, and what may be dropped. Collective.

    Args:
        world: connects all ranks.
        newcomers: parameters without a lane at which a gradient has arrived.
        lanes: all lanes.
        proposals: for each lane, the leaves that no longer need a place on this rank.
        frozen: newcomers that do not store their gradient.
        found: earlier newcomers, in the same order on all ranks.

    Returns:
        For each lane the leaves that no rank needs.

    Raises:
        UsageError: ranks have different newcomers, or different values of one, or have mistaken
            different parameters of equal values for the same one; on all ranks.
    """
    mine: dict[str, Any] = {
        "new": [_describe(leaf, leaf in frozen) for leaf in newcomers],
        "drop": proposals,
        "places": [leaf.place for leaf in found],
    }
    everyones = world.all_gather_json(mine)
    lists = [each["new"] for each in everyones]
    for rank, other in enumerate(lists):
        _compare(lists[0], other, rank)
    _compare_places(found, [each["places"] for each in everyones])
    return [
        set.intersection(*(set(each["drop"][index]) for each in everyones))
        for index in range(len(lanes))
    ]


def refuse_parting(world: Transport, tensors: Sequence[Tensor]) -> None:
    """Refuses a step that would make equal plain tensors differ between groups. Collective.

    Args:
        world: connects all ranks.
        tensors: stepped leaves that are not parameters, with gradients of their own sample group.

    Raises:
        UsageError: a tensor is equal in all groups and its gradient is not; on all ranks.
    """
    mine = [(checksum(t), checksum(t.grad)) for t in tensors if t.grad is not None]
    everyones = world.all_gather_json(mine)
    for tensor, *entries in zip(tensors, *everyones, strict=False):
        values, gradients = zip(*entries, strict=True)
        if len(set(values)) == 1 and len(set(gradients)) > 1:
            raise UsageError(
                f"a step with a plain tensor of shape {list(tensor.shape)} whose gradient is that "
                "of each sample group alone: make it a torch.nn.Parameter, which gets the mean "
                "over all groups; or, if it is data of each group, let it begin with other values "
                "in each"
            )


def refuse_different(data: Transport, weight: Tensor) -> None:
    """Refuses to average gradients of a weight that differs between sample groups. Collective.

    Args:
        data: connects the groups.
        weight: a plain tensor that is used as a parameter.

    Raises:
        UsageError: the weight differs; on all ranks that hold the same part of their samples.
    """
    if not are_equal(data, weight):
        raise UsageError(
            f"a weight of shape {list(weight.shape)}, a plain tensor, differs between the sample "
            "groups, so its gradient has no mean: make it equal on all ranks, or train each on a "
            "mesh with one group"
        )


def are_equal(group: Transport, tensor: Tensor) -> bool:
    """Returns whether all ranks of a group have the same tensor. Collective."""
    return len(set(group.all_gather_bytes(str(checksum(tensor)).encode()))) == 1


def checksum(tensor: Tensor) -> int:
    """Returns the CRC-32C of a tensor's elements."""
    return native.crc32c(tensor.detach().contiguous().cpu())


def _describe(leaf: Leaf, frozen: bool) -> tuple[str, str, int]:
    parameter = leaf.parameter()
    assert parameter is not None
    is_slice = leaf.axes != AXES  # others have another one, perhaps of another shape
    kind = f"slice over {' and '.join(leaf.axes)}" if is_slice else str(leaf.kind)
    return leaf.name, f"{kind}, frozen" if frozen else kind, 0 if is_slice else checksum(parameter)


def _compare(
    first: list[tuple[str, str, int]], other: list[tuple[str, str, int]], rank: int
) -> None:
    for index in range(max(len(first), len(other))):
        one = first[index] if index < len(first) else None
        two = other[index] if index < len(other) else None
        if one is None or two is None or one[1] != two[1]:
            raise UsageError(
                f"gradients of a parameter that is in no parallelized model: rank 0 has "
                f"{_said(one)}, rank {rank} has {_said(two)}; {_HINT}"
            )
        if one[2] != two[2]:
            raise UsageError(
                f"the parameter {_said(two)}, which is in no parallelized model, differs between "
                f"rank 0 and rank {rank}: its gradient has no mean; make it equal, or {_HINT}"
            )


def _compare_places(found: Sequence[Leaf], places: list[list[list[int] | None]]) -> None:
    """Raises if optimizers show that ranks mean different parameters of equal values."""
    for leaf, *of_ranks in zip(found, *places, strict=True):
        leaf.is_placed = leaf.place is not None
        known = [(rank, place) for rank, place in enumerate(of_ranks) if place is not None]
        for rank, place in known[1:]:
            first, (group, index) = known[0][0], known[0][1]
            if place != [group, index]:
                raise UsageError(
                    f"{leaf.name} is a parameter in no parallelized model, and the ranks mean "
                    f"different ones of equal values: number {index} in group {group} of its "
                    f"optimizer on rank {first}, number {place[1]} in group {place[0]} on rank "
                    f"{rank}; the steps so far have mixed their gradients; {_HINT}"
                )


def _said(entry: tuple[str, str, int] | None) -> str:
    return "none" if entry is None else f"{entry[0]} ({entry[1]})"
