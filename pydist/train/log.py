"""The events of a run: appended to `log.jsonl` and passed to listeners that draw progress.

One JSON object per line, each with "event" and "time" (seconds since 1970):

===========  =====================================================================================
start        device, transport, precision, unused_device (why an available CUDA device is not
             used), version, torch, ranks, mesh, threads, parameters, samples, batch, accumulate,
             epochs, steps, step (where it starts), predicts ("volumes", "images" for the classes
             of their voxels, or "samples" for values and classes of samples), config
step         step, epoch, loss, lr, batch (samples of all groups), passes (in stages micro-batches),
             seconds, samples_per_second, gradient_bytes (that this rank has sent: "all", or
             "within" and "between" groups), parts (seconds by part)
layers       step, layers (by parameter: norm weight, norm direction, trust ratio), of LARS and LAMB
noise_scale  step, noise_scale, noise and signal (its parts, see `NoiseScale`), batch
validation   step, epoch, samples, loss; of CosmoFlow mae; of classification accuracy; of
             segmentation, by class, dice (mean over volumes) and pooled_dice (of all their voxels)
data         step, epoch, split, file_bytes (of all ranks), skipped (samples)
rebalance    step, axis, sizes, next_sizes, busy (seconds of a step for each part)
store        step, epoch, split ("train" or "val"); of all ranks, since the last such event:
             hit_rate (fraction of blocks from memory or disk), disk_rate (from disk), file_bytes,
             disk_bytes, received_bytes (from other ranks), lost_blocks (by a disk), held_bytes (now
             in memory), most_held_bytes (of one rank), spilled_bytes (of blocks on disk),
             compression (spilled_bytes over their bytes on disk), most_staged_bytes (on their way
             from disk to another rank, of one rank); with `data.store`
checkpoint   step, path, seconds
notice       text
end          status ("done", "stopped", "failed"), step, seconds, reason
===========  =====================================================================================
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydist.errors import DiskError, UsageError
from pydist.parsing import parse_json

Event = dict[str, Any]
Listener = Callable[[Event], None]

LOG_FILE = "log.jsonl"
"""Name of the log in a run's folder."""
PIPE_VARIABLE = "PYDIST_EVENTS"
"""Environment variable with the pipe of events to the launcher, which owns the terminal."""


class EventLog:
    """Log that writes events to a file and to listeners; non-finite numbers are null in the file.

    Args:
        path: the file, appended to; None for no file, on all ranks but 0.
        listeners: called with each event.

    Raises:
        DiskError: the file can't be written.
    """

    def __init__(self, path: Path | None, listeners: Sequence[Listener] = ()) -> None:
        self.path = path
        self.listeners = list(listeners)
        self.step = 0
        """The step of the last event that named one."""
        self._close: Callable[[], object] | None = None
        self._file = -1

    def emit(self, event: str, **fields: object) -> None:
        """Writes one event."""
        record: Event = {"event": event, "time": time.time(), **fields}
        self.step = record.get("step", self.step)
        if self.path is not None:
            self._append(_dumps(record) + "\n")
        for listener in self.listeners:
            listener(record)

    def close(self) -> None:
        """Closes the file. Idempotent; another event opens it again."""
        if self._close is not None:
            self._close()
            self._close = None

    def _append(self, line: str) -> None:
        assert self.path is not None
        try:
            if self._close is None:
                # Without a buffer: an event is in the file when `emit` returns.
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                self._close = weakref.finalize(self, os.close, self._file)
                if _ends_amid_a_line(self._file):
                    line = "\n" + line
            content = line.encode()
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            raise DiskError(f"can't write {self.path}: {error.strerror}") from error


def _ends_amid_a_line(file: int) -> bool:
    """Returns whether a killed run has left an incomplete line."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _dumps(record: Event) -> str:
    """Returns JSON, which has no NaN and no infinity."""
    try:
        return json.dumps(record, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replaces non-finite numbers with None."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_pipe(path: Path) -> Listener:
    """Creates a listener that sends events to the launcher, if the launcher still exists.

    Raises:
        UsageError: the path names something that is not a pipe.
    """
    try:
        if not stat.S_ISFIFO(path.stat().st_mode):
            raise UsageError(
                f"{PIPE_VARIABLE} names {path}, which is not a named pipe: unset it, or make one "
                "with mkfifo"
            )
        # Without O_NONBLOCK the run would wait for a reader if the launcher has died.
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return lambda _: None

    def listen(event: Event) -> None:
        # A full or broken pipe costs a line on the screen, never a step.
        with contextlib.suppress(OSError):
            os.write(handle, json.dumps(event, default=str).encode() + b"\n")

    return listen


def read(path: Path) -> Iterator[Event]:
    """Yields the events of a log in order; skips incomplete lines of killed runs."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "event" in record:
                yield record


def done_at(path: Path, step: int) -> tuple[bool, bool]:
    """Reads from the log what the run has done after a step.

    Returns:
        Whether it has validated there, and whether it has ended there with its results written.

    Raises:
        DiskError: the log can't be read.
    """
    try:
        events = list(read(path)) if path.exists() else []
    except OSError as error:
        raise DiskError(f"can't read {path}: {error.strerror}") from error
    validated = ended = False
    for event in events:
        if event.get("step") != step:
            continue
        if event["event"] == "step":
            validated = ended = False  # a repeated step has other weights
        validated = validated or event["event"] == "validation"
        ended = ended or (event["event"] == "end" and event.get("status") == "done")
    return validated, ended


def losses(path: Path) -> dict[int, float]:
    """Returns the training loss by step; for a step that a resumed run has repeated, the last."""
    return {e["step"]: e["loss"] for e in read(path) if e["event"] == "step"}
