"""A trace in the format of Chrome's tracing, which Perfetto reads as well.

Source: "Trace Event Format", the JSON object form with complete ("X"), asynchronous ("b", "e") and
metadata ("M") events; times in µs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydist.errors import DiskError
from pydist.profile.gathering import RankSpans
from pydist.profile.recorder import Span

IN_FLIGHT = "halo in flight"


def write_trace(path: Path, ranks: Sequence[RankSpans]) -> None:
    """Writes a trace with one row a rank, where names are layers and categories are parts.

    Raises:
        DiskError: the file can't be written.
    """
    zero = min(each.bounds[0] for each in ranks)
    events = [event for each in ranks for event in _events(each, zero)]
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    except OSError as error:
        raise DiskError(f"can't write {path}: {error.strerror}") from error


def _events(rank: RankSpans, zero: float) -> Iterator[dict[str, Any]]:
    def us(seconds: float) -> float:
        return round(1e6 * (seconds - zero), 3)

    row = {"pid": rank.rank, "tid": 0}
    for what in ("process_name", "thread_name"):
        yield {"ph": "M", "name": what, **row, "args": {"name": f"rank {rank.rank}"}}
    yield {"ph": "M", "name": "process_sort_index", **row, "args": {"sort_index": rank.rank}}
    for number, (start, stop) in enumerate(
        zip(rank.bounds[:-1], rank.bounds[1:], strict=True), start=1
    ):
        yield {
            "ph": "X", "name": f"step {number}", "cat": "step", **row,
            "ts": us(start), "dur": us(stop) - us(start),
        }  # fmt: skip
    for number, span in enumerate(rank.spans):
        about = {"name": span.layer or span.part, "cat": span.part, **row, "args": _notes(span)}
        if span.part == IN_FLIGHT:
            # Beside the row, not in it: it overlaps what the rank does meanwhile.
            key = {"id": f"{rank.rank}.{number}"}
            yield {"ph": "b", **about, **key, "ts": us(span.start)}
            yield {"ph": "e", **about, **key, "ts": us(span.stop)}
        else:
            yield {"ph": "X", **about, "ts": us(span.start), "dur": us(span.stop) - us(span.start)}


def _notes(span: Span) -> dict[str, str]:
    return {"part": span.part, "pass": "backward" if span.backward else "forward"}
