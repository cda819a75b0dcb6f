"""Gathers the spans of all ranks on rank 0, in one clock."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pydist import owner
from pydist.profile.spans import Span

if TYPE_CHECKING:
    from pydist.comm import Transport

_ROUNDS = 9


@dataclass(frozen=True)
class Timeline:
    """Spans that are measured in one clock."""

    bounds: Sequence[float]
    """Times at which steps begin and end: one more than steps."""
    spans: Sequence[Span]


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


def gather_spans(
    world: Transport, layers: Sequence[str], host: Timeline, device: Timeline | None = None
) -> list[RankSpans]:
    """Gathers the spans of all ranks to rank 0, in the clock of rank 0. Collective.

    Args:
        world: the ranks.
        layers: paths of the layers, in the order of their first call.
        host: spans of the rank.
        device: spans of its device, in the same clock.

    Returns:
        On rank 0 one entry per rank, in rank order; elsewhere none.
    """
    offset = clock_offset(world)
    mine = {
        "layers": list(layers),
        "host": _encode(host, offset),
        "device": None if device is None else _encode(device, offset),
    }
    return [_decode(rank, text) for rank, text in enumerate(_gather(world, json.dumps(mine)))]


def _encode(timeline: Timeline, offset: float) -> tuple[list[float], list[Span]]:
    bounds = timeline.bounds
    # A span that is not over at the end of the last step is dropped.
    inside = [s for s in timeline.spans if bounds and bounds[0] <= s.start and s.stop <= bounds[-1]]
    return [bound + offset for bound in bounds], [span.shifted(offset) for span in inside]


def _decode(rank: int, text: str) -> RankSpans:
    found = json.loads(text)
    layers = found["layers"]
    device = None
    if found["device"] is not None:
        bounds, spans = found["device"]
        device = RankSpans(rank, layers, bounds, [Span(*fields) for fields in spans])
    bounds, spans = found["host"]
    return RankSpans(rank, layers, bounds, [Span(*fields) for fields in spans], device)


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
    data = text.encode()
    lengths = world.all_gather(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = world.gather(padded) or []
    return [
        row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=False)
    ]
