"""Draws figures and writes tables of a finished segmentation run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydist.data import ShardDataset
from pydist.errors import DiskError
from pydist.figures import new_figure
from pydist.grid import SPATIAL_AXES
from pydist.partition import Box
from pydist.train import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from pydist.train.config import MeshConfig

DICE_FILE = "dice.csv"

_VOXELS = 1 << 24
"""Voxels of labels that are read at a time."""

_COLORS = ("#00000000", "tab:green", "tab:red", "tab:blue", "tab:orange", "tab:purple")


def write_dice(path: Path, names: Sequence[str], files: Sequence[str], dice: NDArray[Any]) -> None:
    """Writes a table with one row per volume: the Dice of each class, empty where it is NaN.

    Args:
        path: the CSV file.
        names: names of the classes except background.
        files: the file of each volume; one may hold several.
        dice: `[volumes, classes - 1]`, NaN where a class is neither present nor predicted.

    Raises:
        DiskError: the file can't be written.
    """
    try:
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["file", *names])
            for name, row in zip(files, dice.tolist(), strict=True):
                table.writerow([name, *("" if np.isnan(value) else value for value in row)])
    except OSError as error:
        raise DiskError(f"can't write {path}: {error.strerror}") from error


def draw_run(
    folder: Path,
    curves: Mapping[str, Mapping[int, float]],
    data: ShardDataset,
    predicted: NDArray[Any] | None,
    number: int,
    mesh: MeshConfig,
) -> Path:
    """Draws a run: loss curves, Dice, and a slice of a validation volume with truth and prediction.

    Args:
        folder: the run's folder, with the table of Dice; `result.png` is written to it.
        curves: training loss by step, by the name of the run.
        data: the training set.
        predicted: `[D, H, W]`, the classes predicted in a validation volume.
        number: of this volume.
        mesh: the configuration of the grid of ranks, whose blocks are shown.

    Returns:
        The path of the figure.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file can't be written.
    """
    figure = new_figure(18, 4.6)
    axes = figure.subplots(1, 2 if predicted is None else 5)
    report.draw_curves(axes[0], curves, "training loss")
    _draw_dice(axes[1], folder / DICE_FILE)
    if predicted is not None:
        unseen = data.reopened("val")
        found = Slice(unseen, number)
        unseen.close()
        found.draw_on(axes[2:], predicted)
        report.draw_blocks(axes[2], predicted.shape, mesh, found.place)
    return report.publish_figure(figure, folder / report.PICTURE_FILE)


class Slice:
    """Slice that shows a volume of a data set, where most voxels are of the last class.

    Of images, whose depth is 1, it is the whole image. Only the slice is kept, and slabs are read
    to find it: the volume may be larger than the memory of a rank.

    Args:
        data: the data set.
        number: of the volume.
    """

    def __init__(self, data: ShardDataset, number: int = 0) -> None:
        self.number = number
        _, *extents = data.shape_of(number)
        *shown, self._axis = report.shown_dims(extents)
        self._names = [SPATIAL_AXES[dim] for dim in shown]
        counts = np.zeros((len(data.manifest.class_names), extents[self._axis]), dtype=np.int64)
        planes = max(1, _VOXELS // (extents[1] * extents[2]))
        for first in range(0, extents[0], planes):
            slab = Box((first, 0, 0), (min(first + planes, extents[0]), *extents[1:]))
            labels = data.read_labels(number, slab).numpy()
            for k, found in enumerate(counts):
                start = first if self._axis == 0 else 0
                here = (labels == k).sum(tuple(shown))
                found[start : start + len(here)] += here
        shown_classes = [k for k, n in enumerate(counts) if n.any() and k != data.ignore_label]
        rarest = max(shown_classes, default=0)
        self.place = int(counts[rarest].argmax())
        lo, hi = [0, 0, 0], list(extents)
        lo[self._axis], hi[self._axis] = self.place, self.place + 1
        self._truth = data.read_labels(number, Box(lo, hi)).numpy().squeeze(self._axis)
        if data.ignore_label is not None:
            self._truth[self._truth == data.ignore_label] = 0  # not drawn, as background
        self._image = (
            data.read_block(number, Box((0, *lo), (1, *hi)))[0].numpy().squeeze(self._axis)
        )
        self._range = np.percentile(self._image, (0.5, 99.5))

    def draw(self, path: Path, predicted: NDArray[Any]) -> None:
        """Draws image, truth and prediction.

        Args:
            path: of the picture.
            predicted: `[D, H, W]`, the predicted classes.

        Raises:
            DiskError: the file can't be written.
        """
        figure = new_figure(11, 4.2)
        self.draw_on(figure.subplots(1, 3), predicted)
        figure.suptitle(path.stem)
        report.publish_figure(figure, path)

    def draw_on(self, axes: Sequence[Axes], predicted: NDArray[Any]) -> None:
        """Draws the slice, depth upwards: alone, with the truth, and with the prediction."""
        low, high = self._range
        parts = None, self._truth, predicted.take(self.place, self._axis)
        upwards, right = self._names
        for each, classes, title in zip(
            axes, parts, ("A volume", "Truth", "Prediction"), strict=True
        ):
            each.imshow(self._image, cmap="gray", origin="lower", vmin=low, vmax=high)
            each.set(xlabel=f"{right} (voxels)", ylabel=f"{upwards} (voxels)", title=title)
            if classes is not None:
                _draw_classes(each, classes)


def _draw_dice(axes: Axes, table: Path) -> None:
    axes.set(ylabel="Dice", title="Dice of the validation volumes", ylim=(0, 1))
    if not table.exists():
        axes.text(0.5, 0.5, "no validation set", ha="center", transform=axes.transAxes)
        return
    with table.open(newline="") as file:
        header, *rows = csv.reader(file)
    for i in range(1, len(header)):
        found = [float(row[i]) for row in rows if row[i]]
        axes.scatter([i] * len(found), found, s=18, alpha=0.6, color=_COLORS[i % len(_COLORS)])
        if found:
            axes.plot([i - 0.2, i + 0.2], [np.mean(found)] * 2, color="black")
            axes.annotate(f"{np.mean(found):.2f}", (i + 0.22, float(np.mean(found))), va="center")
    axes.set_xticks(range(1, len(header)), header[1:])
    axes.set_xlim(0.5, len(header) - 0.3)


def _draw_classes(axes: Axes, classes: NDArray[Any]) -> None:
    from matplotlib.colors import ListedColormap

    shown = np.where(classes > 0, 1 + (classes - 1) % (len(_COLORS) - 1), 0)
    axes.imshow(
        shown,
        cmap=ListedColormap(_COLORS),
        origin="lower",
        vmin=-0.5,
        vmax=len(_COLORS) - 0.5,
        alpha=0.5,
        interpolation="nearest",
    )
