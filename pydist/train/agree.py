"""Decisions that all ranks must take alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pydist import errors
from pydist.errors import PydistError, UsageError

if TYPE_CHECKING:
    from pydist.comm import Transport


@contextmanager
def together(world: Transport) -> Iterator[None]:
    """Makes an error of one rank an error of all, at the end of the `with` block.

    Collective. For work that ranks do apart (reading files, writing on rank 0): without it the
    others would wait for the one that failed. All raise the error of the lowest failing rank, of
    its own class, so that all end with its exit code. Errors that pydist doesn't know pass through
    on the rank that raised them.

    Raises:
        PydistError: some rank's block raised it.
    """
    mine = None
    try:
        yield
    except PydistError as error:
        mine = error
    report = json.dumps([type(mine).__name__, str(mine)] if mine else None).encode()
    for rank, answer in enumerate(world.all_gather_bytes(report)):
        failure = json.loads(answer)
        if failure is None:
            continue
        if rank == world.rank and mine is not None:
            raise mine
        name, message = failure
        raise getattr(errors, name, PydistError)(message)


def require_same(world: Transport, facts: Mapping[str, str]) -> None:
    """Refuses to go on where ranks differ in what has to be equal. Collective.

    Args:
        world: the ranks to compare.
        facts: by name, under the same names on every rank.

    Raises:
        UsageError: on all ranks, naming the first difference, the ranks and both values.
    """
    everyones = [json.loads(each) for each in world.all_gather_bytes(json.dumps(facts).encode())]
    for name in facts:
        for rank, theirs in enumerate(everyones):
            if theirs[name] != everyones[0][name]:
                raise UsageError(
                    f"{name} differs between the ranks: {everyones[0][name]} on rank 0, "
                    f"{theirs[name]} on rank {rank}"
                )


def any_rank(world: Transport, flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    value = torch.tensor([int(flag)], dtype=torch.int32)
    world.all_reduce(value, "max")
    return bool(value.item())
