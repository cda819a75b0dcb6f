"""Draws a run's events on the terminal: a bar with ETA, speed, and the parts of a step's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pydist.cli.console import Console
from pydist.train.log import Event

_PART_NAMES = {
    "compute": "compute",
    "boundary": "compute",
    "optimizer": "compute",
    "pack": "halo",
    "halo": "halo",
    "gradients": "gradients",
    "transfer": "waiting for stages",
    "data": "waiting for data",
}
_OTHER = "other"  # exchanges for statistics and redistribution, usually short
_PREDICT = {
    "volumes": "case.nii.gz -o labels.nii.gz",
    "images": "image.npy -o labels",
    "samples": "sample.npy -o predictions.csv",
}
"""Input and output of `pydist predict`, by what the network predicts."""
_RECENT_STEPS = 50
_SECONDS_BETWEEN_LINES = 10.0


class EventView:
    """View that draws events: each by the method named after it, if there is one.

    Args:
        console: the console; by default standard output.
    """

    def __init__(self, console: RichConsole | None = None) -> None:
        self.console = console or Console()

    def __call__(self, event: Event) -> None:
        """Handles one event."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def say(self, label: str, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(Text(f"{label:<10} {text}"), soft_wrap=True)


class ProgressView(EventView):
    """View that shows a run's progress: a live bar on a terminal, else a line every 10 seconds.

    Args:
        console: the console; by default standard output.
        label: first word of each line.
        verbose: whether to show the resolved configuration as well.
    """

    def __init__(
        self, console: RichConsole | None = None, label: str = "train", verbose: bool = False
    ) -> None:
        super().__init__(console)
        self.label = label
        self.verbose = verbose
        self._config: Mapping[str, Any] = {}
        self._predicts = ""
        self._recent: deque[Event] = deque(maxlen=_RECENT_STEPS)
        self._validation = ""
        self._steps = 0
        self._epochs = 0
        self._began: tuple[float, int] | None = None
        """Time and number of the first step that was shown."""
        self._last_line = 0.0
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self._task: TaskID | None = None

    def close(self) -> None:
        """Restores the terminal. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _on_start(self, event: Event) -> None:
        self.say(self.label, describe_place(event))
        if self.verbose:
            for table, values in event["config"].items():
                self.say(table, "  ".join(f"{key}={value}" for key, value in values.items()))
        self._steps, self._epochs = event["steps"], event["epochs"]
        self._config = event["config"]
        self._predicts = event["predicts"]
        resumed = f", resuming after step {event['step']}" if event["step"] else ""
        self.say(
            self.label,
            f"{event['parameters']:,} parameters, {event['samples']} samples, {event['mesh']}"
            f"{resumed}",
        )
        if self.console.is_terminal:
            self._task = self._bar.add_task(
                self.label, total=self._steps, completed=event["step"], figures=""
            )
            self._live = Live(console=self.console, refresh_per_second=8)
            self._live.start()

    def _on_step(self, event: Event) -> None:
        self._recent.append(event)
        self._began = self._began or (time.monotonic(), event["step"])
        if self._live is not None and self._task is not None:
            self._bar.update(
                self._task,
                completed=event["step"],
                description=f"{self.label:<10} epoch {self._epoch(event)}",
                figures=self._figures(),
            )
            where = Text(f"{'':<10} {self._where()}", no_wrap=True, overflow="ellipsis")
            self._live.update(Group(self._bar, where))
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._line(event)

    def _on_validation(self, event: Event) -> None:
        self._validation = f"  validation {describe_validation(event)}"

    def _on_notice(self, event: Event) -> None:
        self.say("notice", event["text"])

    def _on_rebalance(self, event: Event) -> None:
        self.close()
        if self._task is not None:
            self._bar.remove_task(self._task)
        before, after = (" + ".join(map(str, event[key])) for key in ("sizes", "next_sizes"))
        busy = ", ".join(f"{seconds:.3g}" for seconds in event["busy"])
        self.say("parts", f"{event['axis']} {after} from here on, {before} were busy for {busy} s")

    def _on_end(self, event: Event) -> None:
        if self._recent and self._live is None:
            self._line(self._recent[-1])
        self.close()
        if self.verbose and event["status"] == "done":
            self._say_results()

    def _say_results(self) -> None:
        """Says where the results of a run are stored, and which commands take them."""
        folder = Path(self._config["output"]["folder"])
        files = ("result.png", "predictions.csv", "dice.csv", "log.jsonl", "ckpt/last")
        found = [name for name in files if (folder / name).exists()]
        self.say("result", f"{folder}: {', '.join(found)}")
        if "ckpt/last" not in found:
            return
        model = self._config["model"]
        code = f" --factory {quote(model['factory'])}" if "factory" in model else ""
        if ":" in model.get("task", ""):
            code += f" --task {quote(model['task'])}"
        run = quote(str(folder))
        self.say("next", f"pydist predict {run} {_PREDICT[self._predicts]}{code}")
        self.say("next", f"pydist export {run} model.safetensors{code}")

    def _line(self, event: Event) -> None:
        self._last_line = time.monotonic()
        self.say(
            self.label,
            f"epoch {self._epoch(event)}  step {event['step']}/{self._steps}  {self._figures()}"
            f"{self._left(event)}",
        )
        self.say("", self._where())

    def _left(self, event: Event) -> str:
        """Returns the time to the end, by the mean time since the first step."""
        assert self._began is not None
        began, first = self._began
        done, left = event["step"] - first, self._steps - event["step"]
        if done < 1 or left < 1:
            return ""
        return f"  {describe_time((time.monotonic() - began) / done * left)} left"

    def _epoch(self, event: Event) -> str:
        return f"{min(event['epoch'] + 1, self._epochs)}/{self._epochs}"

    def _figures(self) -> str:
        seconds = sum(e["seconds"] for e in self._recent)
        samples = sum(e["samples_per_second"] * e["seconds"] for e in self._recent)
        loss = self._recent[-1]["loss"]
        return f"loss {loss:.4f}{self._validation}  {samples / seconds:.1f} samples/s"

    def _where(self) -> str:
        return describe_parts(
            mean_parts([e["parts"] for e in self._recent]),
            sum(e["seconds"] for e in self._recent) / len(self._recent),
        )


def describe_place(facts: Mapping[str, Any]) -> str:
    """Describes device, transport and precision of a run on one line; see `pydist.train.device`."""
    where = ", ".join(f"{fact} {facts[fact]}" for fact in ("device", "transport", "precision"))
    if facts["unused_device"]:
        where += f"; a CUDA device is available but not used: {facts['unused_device']}"
    return where


def describe_validation(event: Event) -> str:
    """Describes the measures of a validation on one line."""
    if "mae" in event:
        mae = event["mae"]  # a log, and the pipe to the launcher, have null for NaN
        return "mae not finite" if mae is None else f"mae {mae:.3f}"
    if "dice" in event:
        found = {k: v for k, v in event["dice"].items() if v is not None}
        return "Dice " + " ".join(f"{name} {d:.3f}" for name, d in found.items())
    # Of another task.
    own = {k: v for k, v in event.items() if isinstance(v, float) and k != "time"}
    return " ".join(f"{name} {value:.3f}" for name, value in own.items())


def describe_time(seconds: float) -> str:
    """Describes a duration by its largest two units, such as "3 h 20 min"."""
    whole = max(0, round(seconds))
    for size, unit, smaller, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {part}"
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole >= 600 else f"{whole // 60} min {whole % 60} s"


def mean_parts(parts: list[Mapping[str, float]]) -> dict[str, float]:
    """Computes the mean seconds by part over steps; a missing part counts as zero."""
    names = dict.fromkeys(name for step in parts for name in step)
    return {name: sum(step.get(name, 0.0) for step in parts) / len(parts) for name in names}


def describe_parts(parts: Mapping[str, float], seconds: float) -> str:
    """Describes the parts of a step on one line: "step 94 ms: compute 71 % · halo 9 % · ..."."""
    shares = {_PART_NAMES[name]: 0.0 for name in _PART_NAMES if name in parts}
    for name, spent in parts.items():
        shown = _PART_NAMES.get(name, _OTHER)
        shares[shown] = shares.get(shown, 0.0) + 100 * spent / seconds
    listed = " · ".join(f"{name} {share:.0f} %" for name, share in shares.items())
    return f"step {1e3 * seconds:.0f} ms: {listed}"
