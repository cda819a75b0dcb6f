"""Checks groups of ranks, barriers, byte strings, and errors."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from pydist.comm import Transport
from pydist.errors import UsageError
from support.transports.checks import Checks

CHECKS = Checks()


@CHECKS.add
def barrier_waits_for_the_last_rank(t: Transport) -> None:
    arrival = torch.zeros(1, dtype=torch.float64)
    if t.rank == t.size - 1:
        time.sleep(0.05)
        arrival[0] = time.monotonic()  # all processes of a machine share the clock
    t.barrier()
    left = time.monotonic()
    t.broadcast(arrival, t.size - 1)
    assert left >= arrival.item()


@CHECKS.add
def split_makes_independent_groups(t: Transport) -> None:
    part = t.split(color=t.rank % 2, key=-t.rank)
    members = [rank for rank in reversed(range(t.size)) if rank % 2 == t.rank % 2]
    assert part.size == len(members)
    assert members[part.rank] == t.rank
    rows = part.all_gather(torch.tensor(t.rank))
    assert rows.tolist() == members
    # Groups run at different speeds; their messages do not match those of the parent.
    for _ in range(1 + t.rank % 2):
        total = torch.tensor([float(t.rank)])
        part.all_reduce(total)
        assert total.item() == sum(members)
    t.send(torch.tensor([1]), (t.rank + 1) % t.size, tag=4)
    part.send(torch.tensor([2]), (part.rank + 1) % part.size, tag=4)
    received = torch.empty(1, dtype=torch.int64)
    part.recv(received, (part.rank - 1) % part.size, tag=4)
    assert received.item() == 2
    t.recv(received, (t.rank - 1) % t.size, tag=4)
    assert received.item() == 1
    alone = part.split(color=part.rank, key=0)
    assert (alone.rank, alone.size) == (0, 1)
    part.close()
    part.close()
    t.barrier()


@CHECKS.add
def byte_strings_of_any_length(t: Transport) -> None:
    for root in range(t.size):
        for data in (b"", b"a", bytes(range(256)) * 5):
            assert t.broadcast_bytes(data if t.rank == root else None, root) == data
    rows = t.all_gather_bytes(b"\0x" * t.rank)
    assert rows == [b"\0x" * rank for rank in range(t.size)]


@CHECKS.add
def gradients_do_not_notice(t: Transport) -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        t.broadcast(weight)
        t.all_reduce(weight)
    rows = t.all_gather(weight)
    assert not rows.requires_grad
    assert rows.tolist() == [[float(t.size)] * 3] * t.size


@CHECKS.add
def wrong_arguments_are_named(t: Transport) -> None:
    cases: list[tuple[str, Callable[[], object]]] = [
        ("not contiguous", lambda: t.all_reduce(torch.zeros(3, 4).t())),
        ("not contiguous", lambda: t.recv(torch.zeros(4, 2)[:, 0], 0)),
        (f"rank {t.size} is outside", lambda: t.broadcast(torch.zeros(1), t.size)),
        ("rank -1 is outside", lambda: t.recv(torch.zeros(1), -1)),
        ("tag 32768 is outside", lambda: t.send(torch.zeros(1), 0, tag=1 << 15)),
        ("op 'mean' is none of", lambda: t.all_reduce(torch.zeros(1), "mean")),  # type: ignore[arg-type]
        (
            "the max of torch.complex64",
            lambda: t.all_reduce(torch.zeros(1, dtype=torch.complex64), "max"),
        ),
        ("complex64 can't be sent", lambda: t.all_gather(torch.zeros(1, dtype=torch.complex64))),
        ("inputs for", lambda: t.all_to_all([], [])),
        ("do not fit counts", lambda: t.all_gather_async(torch.zeros(2), torch.zeros(t.size))),
        (
            "do not fit counts",
            lambda: t.reduce_scatter_async(torch.zeros(3), torch.zeros(1), [1] * (t.size + 1)),
        ),
        (
            "is not contiguous",
            lambda: t.channel([(0, torch.zeros(2, 2).t())], [], tag=0),
        ),
    ]
    for message, call in cases:
        with pytest.raises(UsageError, match=message):
            call()
    t.barrier()  # refused before any message was sent: the ranks are still in step
