"""Curves of a run while it trains: loss, measures of the validation, and learning rate."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pydist.errors import DiskError, UsageError
from pydist.figures import can_draw, new_figure
from pydist.train import report
from pydist.train.log import Event, Listener, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pydist.train.config import OutputConfig

CURVES_FILE = "progress.png"
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's files."""

_SHARE = 0.05
"""Most of a run's time that drawing takes."""
_FEW = 40
"""Steps from which on a smooth curve is drawn over the losses."""


def drawn_in(output: OutputConfig, log: Path) -> list[Listener]:
    """Returns the listeners that draw a run, as its configuration says.

    Args:
        output: of the configuration.
        log: the run's log, whose curves a resumed run continues.

    Raises:
        UsageError: TensorBoard is wanted, and not installed.
    """
    found: list[Listener] = []
    if output.plot and can_draw():
        found.append(Curves(output.folder / CURVES_FILE, log))
    if output.tensorboard:
        found.append(TensorBoard(output.folder / TENSORBOARD))
    return found


def measures(validation: Event) -> dict[str, float]:
    """Returns the measures of a validation by name, with a name for each class; without the loss.

    Measures without a value, such as the Dice of a class that is nowhere, are left out.
    """
    found: dict[str, Any] = {}
    for name, value in validation.items():
        if name in ("event", "time", "step", "epoch", "samples", "loss", "pooled_dice"):
            continue
        if isinstance(value, Mapping):
            found |= {f"{name} {each}": figure for each, figure in value.items()}
        else:
            found[name] = value
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


class Curves:
    """Listener that draws `progress.png` after epochs and validations, and at the end.

    Between, it waits so long that drawing takes at most a twentieth of the time. A picture that
    can't be written ends no run.

    Args:
        path: the picture.
        log: events of an earlier part of the run are read from it.
    """

    def __init__(self, path: Path, log: Path) -> None:
        self._path = path
        self._losses: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._validations: dict[int, float] = {}
        self._measures: dict[str, dict[int, float]] = {}
        self._again = 0.0
        with contextlib.suppress(OSError):
            for event in read(log):
                self._note(event)

    def __call__(self, event: Event) -> None:
        """Handles one event."""
        self._note(event)
        kind = event["event"]
        due = kind == "validation" or (kind == "data" and event["split"] == "train")
        if kind == "end" or (due and time.monotonic() >= self._again):
            began = time.monotonic()
            with contextlib.suppress(DiskError):
                self.draw()
            now = time.monotonic()
            self._again = now + (now - began) / _SHARE

    def _note(self, event: Event) -> None:
        step, loss = event.get("step"), event.get("loss")
        if event["event"] == "step" and step is not None:
            self._losses[step] = math.nan if loss is None else loss
            self._rates[step] = event["lr"]
        elif event["event"] == "validation" and step is not None:
            self._validations[step] = math.nan if loss is None else loss
            for name, value in measures(event).items():
                self._measures.setdefault(name, {})[step] = value

    def draw(self) -> None:
        """Draws the curves.

        Raises:
            DiskError: the file can't be written.
        """
        if not self._losses:
            return
        figure = new_figure(15, 4.2)
        loss, found, rate = figure.subplots(1, 3)
        self._draw_losses(loss)
        for name, values in self._measures.items():
            found.plot(list(values), list(values.values()), marker=".", label=name)
        if self._measures:
            found.legend()
        else:
            found.text(0.5, 0.5, "no validation", ha="center", transform=found.transAxes)
        found.set(xlabel="step", title="Validation")
        rate.plot(list(self._rates), list(self._rates.values()))
        rate.set(xlabel="step", title="Learning rate")
        rate.set_ylim(bottom=0)
        report.publish_figure(figure, self._path)

    def _draw_losses(self, axes: Axes) -> None:
        steps, losses = list(self._losses), list(self._losses.values())
        many = len(steps) > _FEW
        axes.plot(steps, losses, linewidth=1, alpha=0.35 if many else 1.0, label="training")
        if many:
            smooth = _smoothed(np.array(losses), max(5, len(losses) // 20))
            axes.plot(steps, smooth, color="tab:blue", label="training, smoothed")
        if self._validations:
            steps, losses = list(self._validations), list(self._validations.values())
            axes.plot(steps, losses, marker=".", color="tab:orange", label="validation")
        axes.set(xlabel="step", title="Loss")
        axes.legend()


def _smoothed(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Returns the mean of the finite values around each one."""
    finite, window = np.isfinite(values), np.ones(width)
    total = np.convolve(np.where(finite, values, 0.0), window, "same")
    count = np.convolve(finite.astype(np.float64), window, "same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0.5)


class TensorBoard:
    """Listener that writes losses, measures, learning rate and speed for TensorBoard.

    Args:
        folder: of its files.

    Raises:
        UsageError: it is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "output.tensorboard needs TensorBoard: pip install 'pydist[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        """Handles one event."""
        kind, add = event["event"], self._writer.add_scalar
        if kind == "step":
            add("loss/training", event["loss"], event["step"])
            add("learning rate", event["lr"], event["step"])
            add("samples per second", event["samples_per_second"], event["step"])
        elif kind == "validation":
            add("loss/validation", event["loss"], event["step"])
            for name, value in measures(event).items():
                add(f"validation/{name}", value, event["step"])
            self._writer.flush()
        elif kind == "end":
            self._writer.close()
