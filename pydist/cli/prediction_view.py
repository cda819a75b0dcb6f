"""Draws the progress of `pydist predict`: a bar on a terminal, else a line for each volume."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pydist.cli.progress import EventView, describe_place
from pydist.train.log import PIPE_VARIABLE, Event, EventLog, to_pipe

if TYPE_CHECKING:
    import torch

    from pydist.mesh import Mesh


@contextmanager
def reported(mesh: Mesh, device: torch.device, wanted: str, cases: int) -> Iterator[EventLog]:
    """Yields the log of a prediction, whose events this process or its launcher draws.

    Args:
        mesh: the ranks; the first one reports.
        device: of the network.
        wanted: the command's option for it.
        cases: number of outputs.
    """
    from pydist.train.device import facts_of_run

    facts = facts_of_run(device, wanted, "off", mesh.world, "--device")
    pipe, first = os.environ.get(PIPE_VARIABLE), mesh.rank == 0
    view = PredictionView() if first and pipe is None else None
    listener = view or (to_pipe(Path(pipe)) if first and pipe is not None else None)
    log = EventLog(None, [] if listener is None else [listener])
    log.emit("start", cases=cases, **facts)
    try:
        yield log
    finally:
        if view is not None:
            view.close()


class PredictionView(EventView):
    """View that shows which volume is predicted, how far it is, and the time to the end.

    Args:
        console: the console; by default standard output.
    """

    def __init__(self, console: RichConsole | None = None) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn(f"{'predict':<10}"),
            TextColumn("{task.fields[volume]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self._task: TaskID | None = None
        self._cases = 0
        self._finished = 0

    def close(self) -> None:
        """Restores the terminal. Idempotent."""
        if self._task is not None:
            self._bar.stop()
            self._task = None

    def _on_start(self, event: Event) -> None:
        self.say("predict", describe_place(event))
        self._cases = event["cases"]
        if self.console.is_terminal:
            self._task = self._bar.add_task("", total=self._cases, volume=self._volume())
            self._bar.start()

    def _on_windows(self, event: Event) -> None:
        if self._task is not None:
            done = self._finished + event["done"] / event["windows"]
            self._bar.update(self._task, completed=done, volume=self._volume())

    def _on_predicted(self, event: Event) -> None:
        self._finished += 1
        figures = {name: d for name, d in event["dice"].items() if math.isfinite(d)}
        dice = "".join(f" {name} {value:.3f}" for name, value in figures.items())
        said = f"  Dice{dice}" if dice else ""
        self.say("predicted", f"{event['output']}  {event['seconds']:.1f} s{said}")
        if self._task is not None:
            self._bar.update(self._task, completed=self._finished, volume=self._volume())

    def _on_skipped(self, event: Event) -> None:
        self._finished += 1
        self.say("skipped", event["text"])

    def _volume(self) -> str:
        return f"volume {min(self._finished + 1, self._cases)}/{self._cases}"
