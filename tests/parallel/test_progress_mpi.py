"""Tests of the progress of MPI messages between blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from pydist.comm import Transport

pytestmark = pytest.mark.ranks(2, mpi=("openmpi", "mpich"))

ELEMENTS = 1 << 20
PATIENCE_S = 20


def passes(
    transport: Transport, meanwhile: Callable[[], None], condition: Callable[[], bool]
) -> bool:
    """Returns whether a condition becomes true on all ranks while they only call `meanwhile`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (here := condition()) and time.monotonic() < deadline:
        meanwhile()
    return bool(transport.all_gather(torch.tensor(here)).all())


def arrives(transport: Transport, meanwhile: Callable[[], None]) -> bool:
    """Returns whether 4 MB arrive before this rank waits for them."""
    peer = 1 - transport.rank
    sent, received = torch.full((ELEMENTS,), 7.0), torch.zeros(ELEMENTS)
    channel = transport.channel([(peer, sent)], [(peer, received)], tag=3)
    channel.start()
    found = passes(transport, meanwhile, lambda: torch.equal(received, sent))
    channel.wait()
    channel.close()
    return found


def sums_up(transport: Transport, meanwhile: Callable[[], None]) -> bool:
    """Returns whether an all-reduce of 4 MB completes before this rank waits for it."""
    tensor, total = torch.full((ELEMENTS,), 1.0 + transport.rank), torch.full((ELEMENTS,), 3.0)
    work = transport.all_reduce_async(tensor)
    found = passes(transport, meanwhile, lambda: torch.equal(tensor, total))
    work.wait()
    return found


@pytest.mark.parametrize("task", [arrives, sums_up])
def test_calls_of_progress_move_what_is_under_way(world, task):
    assert task(world, world.progress)


def test_polling_disturbs_no_message(world):
    """A message from this rank to itself is unaffected too."""
    world.send(torch.tensor([5.0]), world.rank, tag=1)
    received = torch.zeros(1)
    channel = world.channel([(1 - world.rank, received + 2)], [(1 - world.rank, received)], tag=2)
    channel.start()
    for _ in range(100):
        world.progress()
    channel.wait()
    assert received.item() == 2
    world.recv(received, world.rank, tag=1)
    assert received.item() == 5
