"""What ranks must have equal, and decisions that all of them must take identically."""

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
    """Makes an error of one rank an error of all, at the end of the `with` block.

    Collective. For work that ranks do apart (reading files, writing on rank 0): without it the
    others would wait for the one that failed. All raise the error of the lowest failing rank, of
    its own class, so that all end with its exit code. Errors that pydist doesn't know pass through
    on the rank that raised them.

    Args:
        world: the ranks.
        what: what the block does, for the report of a hang.

    Raises:
        PydistError: some rank's block raised it.
    """
    mine = None
    with phase(what):
        try:
            yield
        except PydistError as error:
            mine = error
        report = json.dumps([type(mine).__name__, str(mine)] if mine else None).encode()
        answers = world.all_gather_bytes(report)
    for rank, answer in enumerate(answers):
        failure = json.loads(answer)
        if failure is None:
            continue
        if rank == world.rank and mine is not None:
            raise mine
        name, message = failure
        raise getattr(errors, name, PydistError)(message)


def require_same(world: Transport, facts: Mapping[str, object]) -> None:
    """Refuses to go on where ranks differ in what has to be equal. Collective.

    One exchange of 32 bytes; the facts themselves travel only where they differ.

    Args:
        world: the ranks to compare.
        facts: by name; shown and compared as strings.

    Raises:
        UsageError: on all ranks, naming the first difference, the ranks and both values.
    """
    if world.size == 1:
        return
    text = json.dumps({name: str(value) for name, value in facts.items()}).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digests = world.all_gather(digest)
    if bool((digests == digests[0]).all()):
        return
    everyones = [json.loads(each) for each in world.all_gather_bytes(text)]
    first = everyones[0]
    for rank, theirs in enumerate(everyones):
        for name in {**first, **theirs}:
            here, there = first.get(name, "absent"), theirs.get(name, "absent")
            if here != there:
                raise UsageError(
                    f"{name} differs between the ranks: {here} on rank 0, {there} on rank {rank}"
                )
    raise UsageError("the ranks give what has to be equal in different orders")


def any_rank(world: Transport, flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    value = torch.tensor([int(flag)], dtype=torch.int32)
    world.all_reduce(value, "max")
    return bool(value.item())
