"""Writing of a trace in the format of Chrome's tracing, which Perfetto reads as well.

Source: "Trace Event Format", the JSON object form with complete ("X"), asynchronous ("b", "e") and
metadata ("M") events; times in µs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydist.errors import DiskError
from pydist.profile.clock import MAIN_STREAM
from pydist.profile.gathering import RankSpans
from pydist.profile.spans import IN_FLIGHT, Span


def write_trace(path: Path, ranks: Sequence[RankSpans]) -> None:
    """Writes a trace with one row per rank, and one per stream of its device.

    Names are layers, categories are parts.

    Raises:
        DiskError: the file can't be written.
    """
    zero = min(each.bounds[0] for each in ranks)
    events = [event for each in ranks for event in _of_rank(each, zero)]
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    except OSError as error:
        raise DiskError(f"can't write {path}: {error.strerror}") from error


def _of_rank(rank: RankSpans, zero: float) -> Iterator[dict[str, Any]]:
    pid = {"pid": rank.rank, "tid": 0}
    yield {"ph": "M", "name": "process_name", **pid, "args": {"name": f"rank {rank.rank}"}}
    yield {"ph": "M", "name": "process_sort_index", **pid, "args": {"sort_index": rank.rank}}
    yield from _events(rank, zero, 0)
    if rank.device is not None:
        yield from _events(rank.device, zero, MAIN_STREAM)


def _events(rank: RankSpans, zero: float, main: int) -> Iterator[dict[str, Any]]:
    """Yields the events of the host, or of its device.

    Args:
        rank: the spans.
        zero: start of the trace, in seconds.
        main: the row of the steps.
    """

    def us(seconds: float) -> float:
        return round(1e6 * (seconds - zero), 3)

    for row in sorted({main, *(span.stream for span in rank.spans)}):
        name = f"stream {row}" if row else f"rank {rank.rank}"
        at = {"pid": rank.rank, "tid": row}
        yield {"ph": "M", "name": "thread_name", **at, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": row}}
    steps = zip(rank.bounds[:-1], rank.bounds[1:], strict=True)
    for number, (start, stop) in enumerate(steps, start=1):
        yield {
            "ph": "X", "name": f"step {number}", "cat": "step", "pid": rank.rank, "tid": main,
            "ts": us(start), "dur": us(stop) - us(start),
        }  # fmt: skip
    for number, span in enumerate(rank.spans):
        about = {
            "name": span.layer or span.part, "cat": span.part, "args": _notes(span),
            "pid": rank.rank, "tid": span.stream,
        }  # fmt: skip
        if span.part == IN_FLIGHT:
            # Asynchronous, as it overlaps other work of the rank.
            key = {"id": f"{rank.rank}.{main}.{number}"}
            yield {"ph": "b", **about, **key, "ts": us(span.start)}
            yield {"ph": "e", **about, **key, "ts": us(span.stop)}
        else:
            yield {"ph": "X", **about, "ts": us(span.start), "dur": us(span.stop) - us(span.start)}


def _notes(span: Span) -> dict[str, str]:
    return {"part": span.part, "pass": "backward" if span.backward else "forward"}
