"""Checks that values are equal on all ranks, and decisions that all ranks make identically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pydist import errors
from pydist.errors import PydistError, UsageError
from pydist.watchdog import phase

if TYPE_CHECKING:
    from pydist.comm import Transport


@contextmanager
def together(world: Transport, what: str = "work that one rank may do alone") -> Iterator[None]:
    """Raises an error of one rank on all ranks, at the end of the `with` block.

    Collective. For rank-local work (reading files, writing on rank 0): without it the other ranks
    would wait for the failed one. All ranks raise the error of the lowest failing rank, with its
    class, or the next base of it in `pydist.errors`, so that all end with its exit code. Errors
    that are no `PydistError` propagate on the rank that raised them.

    Args:
        world: the ranks.
        what: a description of the block, for the report of a hang.

    Raises:
        PydistError: some rank's block raised it.
    """
    mine = None
    with phase(what):
        try:
            yield
        except PydistError as error:
            mine = error
        failures = world.all_gather_json([_family(mine), str(mine)] if mine else None)
    for rank, failure in enumerate(failures):
        if failure is None:
            continue
        name, message = failure
        raised: PydistError = getattr(errors, name)(message)
        if rank == world.rank and mine is not None:
            raised = mine
        raised.on_all_ranks = True
        raise raised


def _family(error: PydistError) -> str:
    """Returns the name of an error's class, or of the next base of it, in `pydist.errors`."""
    return next(c.__name__ for c in type(error).__mro__ if vars(errors).get(c.__name__) is c)


def require_same(world: Transport, facts: Mapping[str, object]) -> None:
    """Raises an error if the ranks differ in values that must be equal. Collective.

    One exchange of 32 bytes; the values themselves are sent only if they differ.

    Args:
        world: the ranks to compare.
        facts: the values by name; shown and compared as strings.

    Raises:
        UsageError: on all ranks; names the first difference, the ranks and both values.
    """
    if world.size == 1:
        return
    texts = {name: str(value) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(texts).encode()).digest()
    digests = world.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if bool((digests == digests[0]).all()):
        return
    everyones = world.all_gather_json(texts)
    first = everyones[0]
    for rank, theirs in enumerate(everyones):
        for name in {**first, **theirs}:
            here, there = first.get(name, "absent"), theirs.get(name, "absent")
            if here != there:
                raise UsageError(
                    f"{name} differs between the ranks: {here} on rank 0, {there} on rank {rank}"
                )
    raise UsageError("the ranks give values that must be equal in different orders")


def any_rank(world: Transport, flag: bool) -> bool:
    """Returns whether the flag is set on any rank. Collective."""
    value = torch.tensor([int(flag)], dtype=torch.int32)
    world.all_reduce(value, "max")
    return bool(value.item())
