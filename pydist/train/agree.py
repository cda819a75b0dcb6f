"""Decisions that all ranks must take alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pydist import errors
from pydist.errors import PydistError

if TYPE_CHECKING:
    from pydist.comm.transport import Transport


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


def any_rank(world: Transport, flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    value = torch.tensor([int(flag)], dtype=torch.int32)
    world.all_reduce(value, "max")
    return bool(value.item())
