"""Gathers the spans of all ranks on rank 0, in one clock."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pydist import owner
from pydist.profile.spans import Span

if TYPE_CHECKING:
    from pydist.comm import Transport

_ROUNDS = 9
_TAG = 1022


@dataclass(frozen=True)
class RankSpans:
    """Spans that one rank, or its device, has in the measured steps."""

    rank: int
    layers: list[str]
    """Paths of the layers, in the order of their first call."""
    bounds: list[float]
    """Times at which steps begin and end: one more than steps."""
    spans: list[Span]
    device: RankSpans | None = None
    """Spans of the rank's device, if it is asynchronous to the host."""

    @property
    def steps(self) -> int:
        """Number of steps that were measured."""
        return len(self.bounds) - 1


def gather_spans(world: Transport, mine: RankSpans) -> list[RankSpans]:
    """Gathers the spans of all ranks to rank 0, in the clock of rank 0. Collective.

    Args:
        world: the ranks.
        mine: spans of this rank, and of its device in the same clock.

    Returns:
        On rank 0 one entry per rank, in rank order; elsewhere none.
    """
    text = json.dumps(_shifted(mine, clock_offset(world)), default=vars)
    return [_decoded(json.loads(each)) for each in _gather(world, text)]


def _shifted(mine: RankSpans, offset: float) -> RankSpans:
    """Returns spans in a clock that is ahead, without one that is not over with the last step."""
    bounds = mine.bounds
    inside = [s for s in mine.spans if bounds and bounds[0] <= s.start and s.stop <= bounds[-1]]
    return replace(
        mine,
        bounds=[bound + offset for bound in bounds],
        spans=[span.shifted(offset) for span in inside],
        device=None if mine.device is None else _shifted(mine.device, offset),
    )


def _decoded(found: dict[str, Any]) -> RankSpans:
    spans, device = [Span(*fields) for fields in found["spans"]], found["device"]
    return RankSpans(**{**found, "spans": spans, "device": device and _decoded(device)})


def clock_offset(world: Transport) -> float:
    """Returns the seconds to add to this rank's `time.perf_counter` for rank 0's. Collective.

    Ranks of one machine share a clock. Between machines all ranks repeatedly read their clocks when
    they leave a barrier; the error of the median difference is about the time of leaving.
    """
    differences = []
    for _ in range(_ROUNDS):
        world.barrier()
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        everyones = world.all_gather(now)
        differences.append(float(everyones[0] - now))
    machines = world.all_gather_bytes(owner.kernel().encode())
    return 0.0 if machines[0] == machines[world.rank] else statistics.median(differences)


def _gather(world: Transport, text: str) -> list[str]:
    """Returns the texts of all ranks on rank 0; an empty list elsewhere."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = world.all_gather(torch.tensor([len(data)])).flatten().tolist()
    if world.rank:
        world.send(data, 0, _TAG)
        return []
    rows = [data, *(torch.empty(length, dtype=torch.uint8) for length in lengths[1:])]
    for rank in range(1, world.size):
        world.recv(rows[rank], rank, _TAG)
    return [row.numpy().tobytes().decode() for row in rows]
