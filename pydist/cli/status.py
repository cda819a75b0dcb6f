"""`pydist status`: tells from outside how far a run is, and how it fares."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydist.cli.own_options import OwnOptions
from pydist.errors import DiskError, UsageError
from pydist.parsing import parse_json
from pydist.train.log import Event

_RECENT = 50
"""Steps whose time tells the time to the end."""


def status(arguments: Sequence[str]) -> int:
    """Runs `pydist status`; see `pydist status --help`."""
    options = _parse(arguments)
    found = status_of(options.run)
    if options.json:
        print(json.dumps(found))
    else:
        for line in _lines(found):
            print(line)
    return 0


def status_of(run: Path) -> dict[str, Any]:
    """Returns what the log of a run tells, with the state of its process.

    Args:
        run: the folder of the run.

    Returns:
        "run"; "state" ("running", "done", "stopped", "failed", or "killed", without a reason);
        "writer" (the running process) and "reason" (of the end), or ""; "seconds_left", None if it
        is unknown; "age", seconds since the last event; and the last events "start", "step",
        "validation", "checkpoint" and "notice", each None if there is none.

    Raises:
        UsageError: the folder has no log of a run.
        DiskError: the log can't be read.
    """
    from pydist.data.lock import writer_of

    last, steps = _events(run)
    start = last.get("start")
    if start is None:
        raise UsageError(f"{run} has no log of a run that has begun; expected the folder of a run")
    end, writer = last.get("end"), writer_of(run) or ""
    # A log goes on after an end when its run is resumed.
    over = end is not None and end["time"] >= start["time"]
    state = "running" if writer else "killed"
    if over and end is not None:
        state = end["status"]
    latest = max(event["time"] for event in last.values())
    return {
        "run": str(run),
        "state": state,
        "writer": "" if over else writer,
        "reason": end["reason"] if over and end is not None else "",
        "seconds_left": _seconds_left(start, steps) if state == "running" else None,
        "age": time.time() - latest,
        **{
            kind: last.get(kind) for kind in ("start", "step", "validation", "checkpoint", "notice")
        },
    }


def _events(run: Path) -> tuple[dict[str, Event], list[Event]]:
    """Returns the last event of each kind, and the recent steps; a log may have millions."""
    last: dict[bytes, bytes] = {}
    steps: deque[bytes] = deque(maxlen=_RECENT)
    try:
        with (run / "log.jsonl").open("rb") as file:
            for line in file:
                if not line.endswith(b"}\n"):
                    continue  # a killed run was writing it
                kind = line[:40].partition(b",")[0]
                last[kind] = line
                if kind.endswith(b'"start"'):
                    steps.clear()
                    last.pop(kind.replace(b"start", b"notice"), None)  # of the session before
                if kind.endswith(b'"step"'):
                    steps.append(line)
    except FileNotFoundError:
        raise UsageError(f"{run} has no log.jsonl: expected the folder of a run") from None
    except OSError as error:
        raise DiskError(f"can't read {run / 'log.jsonl'}: {error.strerror}") from error
    found = {event["event"]: event for event in _parsed(last.values())}
    return found, list(_parsed(steps))


def _parsed(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yields the events of lines; skips incomplete ones, which killed runs leave."""
    for line in lines:
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event and "time" in event:
            yield event


def _seconds_left(start: Event, steps: Sequence[Event]) -> float | None:
    """Returns the seconds to the end, from the time of recent steps with what is between them."""
    if len(steps) < 2:
        return None
    a_step = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
    return float(a_step * max(0, start["steps"] - steps[-1]["step"]))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    from pydist.cli.progress import (
        describe_parts,
        describe_place,
        describe_time,
        describe_validation,
    )

    start, step = found["start"], found["step"]
    who = f", {found['writer']}" if found["writer"] else ""
    why = f": {found['reason']}" if found["reason"] else ""
    yield _line("run", f"{found['run']} {found['state']}{who}{why}")
    yield _line("ranks", f"{start['mesh']}, {describe_place(start)}")
    if step is not None:
        share = step["step"] / start["steps"] if start["steps"] else 1.0
        left = found["seconds_left"]
        ends = "" if left is None else f"  {describe_time(left)} left"
        epoch = min(step["epoch"] + 1, start["epochs"])
        yield _line(
            "progress",
            f"epoch {epoch}/{start['epochs']}  step {step['step']}/{start['steps']}  "
            f"{share:.0%}{ends}",
        )
        loss = "not finite" if step["loss"] is None else f"{step['loss']:.4f}"
        yield _line(
            "step",
            f"loss {loss}  lr {step['lr']:.3g}  {step['samples_per_second']:.1f} samples/s  "
            f"{describe_parts(step['parts'], step['seconds'])}",
        )
    if found["validation"] is not None:
        event = found["validation"]
        yield _line("validation", f"step {event['step']}  {describe_validation(event)}")
    if found["checkpoint"] is not None:
        event = found["checkpoint"]
        ago = describe_time(time.time() - event["time"])
        yield _line("checkpoint", f"step {event['step']}, {ago} ago: {event['path']}")
    if found["notice"] is not None:
        yield _line("notice", found["notice"]["text"])
    if found["state"] == "running":
        yield _line("last event", f"{describe_time(found['age'])} ago")


def _line(label: str, text: str) -> str:
    return f"{label:<10} {text}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = OwnOptions(
        prog="pydist status",
        description="Tells how far a run is, from its log: also while it runs, from any machine "
        "that sees its folder.",
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print all facts as JSON")
    return parser.parse_args(arguments)
