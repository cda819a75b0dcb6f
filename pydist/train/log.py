"""The events of a run: appended to `log.jsonl`, and handed to what draws progress.

One JSON object a line, with "event" and "time" (seconds since 1970) in each:

===========  =====================================================================================
start        device, transport, precision, unused_device (why a CUDA device that is there is not
             used), version, ranks, mesh, threads, parameters, samples, epochs, steps, step (where
             it starts), config
step         step, epoch, loss, lr, seconds, samples_per_second, parts (seconds by part)
validation   step, epoch, samples, loss; of CosmoFlow mae; of segmentation, by class, dice (mean
             over volumes) and pooled_dice (of all their voxels)
checkpoint   step, path, seconds
notice       text
end          status ("done", "stopped", "failed"), step, seconds, reason
===========  =====================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydist.errors import DiskError
from pydist.parsing import parse_json

Event = dict[str, Any]
Listener = Callable[[Event], None]

PIPE_VARIABLE = "PYDIST_EVENTS"
"""Names the pipe through which the launcher, which owns the terminal, follows the run."""


class EventLog:
    """Writes events to a file and to listeners.

    Args:
        path: the file; appended to. None writes no file: every rank but 0 has such a log.
        listeners: called with each event.

    Raises:
        DiskError: the file can't be written.
    """

    def __init__(self, path: Path | None, listeners: Sequence[Listener] = ()) -> None:
        self.path = path
        self.listeners = list(listeners)
        self.step = 0
        """The step of the last event that named one."""

    def emit(self, event: str, **fields: object) -> None:
        """Writes one event."""
        record: Event = {"event": event, "time": time.time(), **fields}
        self.step = record.get("step", self.step)
        if self.path is not None:
            self._append(json.dumps(record, default=str) + "\n")
        for listener in self.listeners:
            listener(record)

    def _append(self, line: str) -> None:
        assert self.path is not None
        try:
            with self.path.open("ab+") as file:
                if _ends_amid_a_line(file):
                    line = "\n" + line
                file.write(line.encode())
        except OSError as error:
            raise DiskError(f"can't write {self.path}: {error.strerror}") from error


def _ends_amid_a_line(file: Any) -> bool:
    """Whether a run that was killed left half a line."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) != b"\n")


def to_pipe(path: Path) -> Listener:
    """A listener that hands events to the launcher; falls silent when the launcher is gone."""
    # Without O_NONBLOCK a launcher that died would leave the run waiting for a reader.
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return lambda _: None

    def listen(event: Event) -> None:
        # A full or broken pipe costs a line on the screen, never a step.
        with contextlib.suppress(OSError):
            os.write(handle, json.dumps(event, default=str).encode() + b"\n")

    return listen


def read(path: Path) -> Iterator[Event]:
    """The events of a log, in order; half a line that a killed run left is passed over."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "event" in record:
                yield record


def losses(path: Path) -> dict[int, float]:
    """Training loss by step; of a step that a resumed run repeated, the last."""
    return {e["step"]: e["loss"] for e in read(path) if e["event"] == "step"}
