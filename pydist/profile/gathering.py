"""The spans of all ranks on rank 0, by one clock."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pydist.profile.spans import Span

if TYPE_CHECKING:
    from pydist.comm import Transport

_ROUNDS = 9
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Timeline:
    """Spans by one clock."""

    bounds: Sequence[float]
    """Where steps begin and end: one more than there are steps."""
    spans: Sequence[Span]


@dataclass(frozen=True)
class RankSpans:
    """What one rank, or its device, did in the steps that were measured."""

    rank: int
    layers: list[str]
    """In the order of their first call."""
    bounds: list[float]
    """Where steps begin and end: one more than there are steps."""
    spans: list[Span]
    device: RankSpans | None = None
    """What the rank's device did meanwhile, if it has one that works behind the host's back."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.bounds) - 1


def gather_spans(
    world: Transport, layers: Sequence[str], host: Timeline, device: Timeline | None = None
) -> list[RankSpans]:
    """Brings what every rank recorded to rank 0, in time of rank 0. Collective.

    Args:
        world: the ranks.
        layers: in the order of their first call.
        host: what the rank did.
        device: what its device did, by the same clock.

    Returns:
        On rank 0 one entry a rank, in rank order; elsewhere none.
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
    # A span that began in a step and was not over at its end belongs to none.
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
    """Seconds to add to this rank's `time.perf_counter` to get that of rank 0. Collective.

    Ranks of one machine share a clock. Between machines all ranks read theirs when they leave a
    barrier, several times over; the median difference is off by about the time that leaving takes.
    """
    differences = []
    for _ in range(_ROUNDS):
        world.barrier()
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        everyones = world.all_gather(now)
        differences.append(float(everyones[0] - now))
    machines = world.all_gather_bytes(_machine())
    same = machines[0] and machines[0] == machines[world.rank]
    return 0.0 if same else statistics.median(differences)


def _machine() -> bytes:
    """What ranks have in common whose `time.perf_counter` is one clock; empty if unknown."""
    try:
        return _BOOT.read_bytes()
    except OSError:
        return b""


def _gather(world: Transport, text: str) -> list[str]:
    """The texts of all ranks on rank 0; nothing elsewhere."""
    data = text.encode()
    lengths = world.all_gather(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = world.gather(padded) or []
    return [
        row[:length].numpy().tobytes().decode() for row, length in zip(rows, lengths, strict=False)
    ]
