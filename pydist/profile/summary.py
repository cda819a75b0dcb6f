"""Summarizes spans: mean seconds by layer and part."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydist.profile.clock import MAIN_STREAM
from pydist.profile.gathering import RankSpans
from pydist.profile.spans import HALO_WAIT, IN_FLIGHT, PASS, Span
from pydist.timers import COMPUTATION

COLUMNS = (
    "forward", "backward", "posted", "exposed", "boundary", "statistics", "gradients", "optimizer",
    "transfer", "data", "other",
)  # fmt: skip
"""Computation in forward and in backward; the halo, posted and waited for; the other parts; and
the rest: redistribution, the profiler, and unmeasured time (the loop, the loss, the engine)."""
_COLUMN_ON_HOST = {"pack": "posted", "halo": "exposed"}
# On a device the wait is measured separately, and the rest of "halo" is unpacking.
_COLUMN_ON_DEVICE = {"pack": "posted", HALO_WAIT: "exposed", "halo": "boundary"}

Seconds = Mapping[str, float]
"""Seconds by column."""


@dataclass(frozen=True)
class Summary:
    """Times that a step takes by layer and part, in seconds per step, means over measured steps.

    Attributes:
        steps: number of measured steps.
        ranks: number of ranks.
        step: duration of a step, mean over ranks. The columns of `total` add up to it.
        layers: by path, in the order of their first call, mean over ranks; "" is outside of layers.
        total: sum over all layers, mean over ranks.
        least: minimum of `total` over ranks, by column.
        most: maximum of `total` over ranks, by column.
        in_flight: time in which halos were in flight, mean over ranks.
        hidden: fraction of `in_flight` in which the rank did not wait; None without halos.
        on_device: whether the times were measured on the ranks' devices.
    """

    steps: int
    ranks: int
    step: float
    layers: dict[str, Seconds]
    total: Seconds
    least: Seconds
    most: Seconds
    in_flight: float
    hidden: float | None
    on_device: bool = False


def summarize(ranks: Sequence[RankSpans]) -> Summary:
    """Summarizes the spans of all ranks, or of their devices, if all have one."""
    devices = [rank.device for rank in ranks if rank.device is not None]
    if len(devices) == len(ranks):
        return replace(summarize(devices), on_device=True)
    each = [_of_rank(rank) for rank in ranks]
    totals = [{c: sum(row[c] for row in rows.values()) for c in COLUMNS} for rows in each]
    flights = [f for rank in ranks for f in rank.spans if f.part == IN_FLIGHT]
    flown = sum(f.stop - f.start for f in flights)
    waited = sum(_waited(rank) for rank in ranks)
    paths = dict.fromkeys(path for rank in ranks for path in [*rank.layers, ""])
    paths[""] = paths.pop("")  # comes last
    rank_steps = sum(rank.steps for rank in ranks)
    return Summary(
        steps=ranks[0].steps,
        ranks=len(ranks),
        step=sum(rank.bounds[-1] - rank.bounds[0] for rank in ranks) / rank_steps,
        layers={
            path: {c: sum(rows[path][c] for rows in each) / len(ranks) for c in COLUMNS}
            for path in paths
        },
        total={c: sum(t[c] for t in totals) / len(ranks) for c in COLUMNS},
        least={c: min(t[c] for t in totals) for c in COLUMNS},
        most={c: max(t[c] for t in totals) for c in COLUMNS},
        in_flight=flown / rank_steps,
        hidden=1 - waited / flown if flown else None,
    )


def _of_rank(rank: RankSpans) -> defaultdict[str, defaultdict[str, float]]:
    """Computes seconds per step of one rank, by layer and column."""
    rows: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    rest = rank.bounds[-1] - rank.bounds[0]
    for span in rank.spans:
        if span.stream > MAIN_STREAM:  # concurrent to the steps
            continue
        layer = "" if span.part == PASS else span.layer
        rows[layer][_column(span)] += span.own / rank.steps
        rest -= span.own
    rows[""]["other"] += rest / rank.steps
    return rows


def _column(span: Span) -> str:
    if span.part in COMPUTATION:
        return "backward" if span.backward else "forward"
    columns = _COLUMN_ON_DEVICE if span.stream else _COLUMN_ON_HOST
    column = columns.get(span.part, span.part)
    return column if column in COLUMNS else "other"


def _waited(rank: RankSpans) -> float:
    """Computes the seconds in which a rank waited for halos in flight."""
    waits = sorted(
        (s.start, s.stop) for s in rank.spans if s.part == (HALO_WAIT if s.stream else "halo")
    )
    waited = 0.0
    for flight in (s for s in rank.spans if s.part == IN_FLIGHT):
        # Waits do not overlap, so none that begins before the one found here ends later.
        first = max(0, bisect_right(waits, (flight.start, 0.0)) - 1)
        for start, stop in waits[first:]:
            if start >= flight.stop:
                break
            waited += max(0.0, min(stop, flight.stop) - max(start, flight.start))
    return waited
