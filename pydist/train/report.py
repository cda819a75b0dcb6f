"""Draws figures and writes tables of a finished run."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydist.data import ShardDataset
from pydist.data.dataset import BadSample
from pydist.data.publish import publish
from pydist.errors import DiskError
from pydist.figures import new_figure
from pydist.grid import SPATIAL_AXES
from pydist.partition import Box, split_extent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from pydist.train.config import MeshConfig

PREDICTIONS_FILE = "predictions.csv"
PICTURE_FILE = "result.png"


def write_predictions(
    path: Path, names: Sequence[str], predicted: NDArray[Any], true: NDArray[Any]
) -> None:
    """Writes a table with one row per sample: each parameter's true and predicted value.

    Args:
        path: the CSV file.
        names: names of the parameters.
        predicted: `[samples, parameters]`.
        true: `[samples, parameters]`.

    Raises:
        DiskError: the file can't be written.
    """
    try:
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow([f"{kind} {name}" for kind in ("true", "predicted") for name in names])
            table.writerows(np.hstack([true, predicted]).tolist())
    except OSError as error:
        raise DiskError(f"can't write {path}: {error.strerror}") from error


def draw_run(
    folder: Path,
    curves: Mapping[str, Mapping[int, float]],
    data: ShardDataset,
    mesh: MeshConfig,
) -> Path:
    """Draws a run: loss curves, predicted against true parameters, a sample and its blocks.

    Args:
        folder: the run's folder, with the predictions; `result.png` is written to it.
        curves: training loss by step, by the name of the run.
        data: the training set, whose first good sample is shown.
        mesh: the configuration of the grid of ranks, whose blocks are shown.

    Returns:
        The path of the figure.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file can't be written.
    """
    samples = data.reopened(data.split)
    sample = _first_good(samples)
    samples.close()
    figure = new_figure(15, 4.8)
    axes = figure.subplots(1, 3)
    draw_curves(axes[0], curves, "training loss (MSE)")
    _draw_predictions(axes[1], folder / PREDICTIONS_FILE)
    if sample is None:
        axes[2].set_axis_off()
    else:
        _draw_sample(axes[2], sample, mesh)
    return publish_figure(figure, folder / PICTURE_FILE)


def _first_good(data: ShardDataset) -> NDArray[Any] | None:
    """Returns the first channel of the first sample that is not bad: a run may skip some."""
    for index in range(len(data)):
        _, *extents = data.shape_of(index)
        with contextlib.suppress(BadSample):
            block = data.read_block(index, Box([0, 0, 0, 0], [1, *extents]))
            found: NDArray[Any] = block[0].float().numpy()
            return found
    return None


def publish_figure(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, atomically; returns the path.

    Raises:
        DiskError: the file can't be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    publish(path, content.getbuffer())
    return path


def blocks_of(extents: Sequence[int], mesh: MeshConfig) -> list[Box]:
    """Returns the block of each rank of a sample group, boxes over (depth, height, width)."""
    parts, shares = mesh.parts(), mesh.shares.given
    cuts = [
        split_extent(n, parts[axis], shares.get(axis))
        for n, axis in zip(extents, SPATIAL_AXES, strict=True)
    ]
    intervals = itertools.product(*([c.interval(i) for i in range(c.parts)] for c in cuts))
    return [Box([lo for lo, _ in each], [hi for _, hi in each]) for each in intervals]


def draw_sample(
    path: Path, names: Sequence[str], predicted: NDArray[Any], true: NDArray[Any]
) -> None:
    """Draws predicted over true values of a validation; see `write_predictions`.

    Raises:
        DiskError: the file can't be written.
    """
    figure = new_figure(5, 4.8)
    axes = figure.subplots()
    axes.set(xlabel="true", ylabel="predicted", title=path.stem)
    draw_predictions(axes, names, predicted, true)
    publish_figure(figure, path)


def draw_curves(axes: Axes, curves: Mapping[str, Mapping[int, float]], label: str) -> None:
    """Draws training losses by step."""
    # Curves of several runs coincide if they agree, so the first one is a broad band below.
    styles: list[dict[str, Any]] = [
        {"linewidth": 6, "alpha": 0.3, "color": "tab:blue"},
        {"linewidth": 1.4, "color": "black", "linestyle": (0, (4, 3))},
        {"linewidth": 1.0, "color": "tab:red", "linestyle": ":"},
    ]
    if len(curves) == 1:
        styles[0] = {"linewidth": 1.4, "color": "tab:blue"}
    for (name, losses), style in zip(curves.items(), styles, strict=False):
        axes.plot(list(losses), list(losses.values()), label=name, **style)
    axes.set(xlabel="step", ylabel=label, title="Loss")
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_predictions(axes: Axes, table: Path) -> None:
    axes.set(xlabel="true", ylabel="predicted", title="Parameters of the validation universes")
    if not table.exists():
        axes.text(0.5, 0.5, "no validation set", ha="center", transform=axes.transAxes)
        return
    draw_predictions(axes, *read_predictions(table))


def read_predictions(table: Path) -> tuple[list[str], NDArray[Any], NDArray[Any]]:
    """Returns names, predicted and true values, both [samples, names], of `write_predictions`."""
    with table.open(newline="") as file:
        header, *rows = csv.reader(file)
    values = np.array(rows, dtype=float).reshape(len(rows), 2, -1)
    names = [name.removeprefix("true ") for name in header[: values.shape[2]]]
    return names, values[:, 1], values[:, 0]


def explained(predicted: NDArray[Any], true: NDArray[Any]) -> float:
    """Returns R², the part of the variance of true values that predictions explain.

    1 is perfect, 0 as good as the mean; NaN without variance.
    """
    variance = float(true.var()) if true.size else 0.0
    return 1 - float(np.mean((predicted - true) ** 2)) / variance if variance else math.nan


def draw_predictions(
    axes: Axes, names: Sequence[str], predicted: NDArray[Any], true: NDArray[Any]
) -> None:
    """Draws predicted over true values, a color for each name; see `write_predictions`."""
    largest = max(1.0, *(float(np.abs(each).max(initial=0)) for each in (true, predicted)))
    limits = -1.1 * largest, 1.1 * largest
    axes.axline((0, 0), slope=1, color="gray", linewidth=1)
    axes.set(xlim=limits, ylim=limits, aspect="equal")
    for i, name in enumerate(names):
        r2 = explained(predicted[:, i], true[:, i])
        label = name if math.isnan(r2) else f"{name}, R² {r2:.2f}"
        axes.scatter(true[:, i], predicted[:, i], s=18, alpha=0.7, label=label)
    axes.legend()


def shown_dims(extents: Sequence[int]) -> tuple[int, int, int]:
    """Returns the dims of (D, H, W) that a picture shows upwards and to the right, and the other.

    Depth is split first, so it is one of the two, except of images, which are flat.
    """
    return (1, 2, 0) if extents[0] == 1 else (0, 1, 2)


def _draw_sample(axes: Axes, sample: NDArray[Any], mesh: MeshConfig) -> None:
    rows, columns, across = shown_dims(sample.shape)
    place = sample.shape[across] // 2
    shown, label = sample.take(place, across), "value"
    if shown.min() >= 0:  # such as counts of particles, most of them small
        shown, label = np.log1p(shown), "log(1 + value)"
    picture = axes.imshow(shown, cmap="magma", origin="upper")
    axes.figure.colorbar(picture, ax=axes, label=label, shrink=0.8)
    draw_blocks(axes, sample.shape, mesh, place)
    axes.set(
        xlabel=f"{SPATIAL_AXES[columns]} (voxels)",
        ylabel=f"{SPATIAL_AXES[rows]} (voxels)",
        title="A sample and its blocks",
    )


def draw_blocks(axes: Axes, extents: Sequence[int], mesh: MeshConfig, place: int) -> None:
    """Draws the ranks' blocks over a slice with the `shown_dims`, at a place of the other dim."""
    from matplotlib.patheffects import withStroke

    rows, columns, across = shown_dims(extents)
    for index, block in enumerate(blocks_of(extents, mesh)):
        if block.empty or not block.lo[across] <= place < block.hi[across]:
            continue
        top, bottom = block.lo[rows], block.hi[rows]
        left, right = block.lo[columns], block.hi[columns]
        axes.plot(
            [left - 0.5, right - 0.5, right - 0.5, left - 0.5, left - 0.5],
            [top - 0.5, top - 0.5, bottom - 0.5, bottom - 0.5, top - 0.5],
            color="cyan",
            linewidth=2,
            clip_on=False,
        )
        axes.annotate(
            f"block {index}",
            ((left + right) / 2, (top + bottom) / 2),
            color="cyan",
            ha="center",
            va="center",
            fontsize=13,
            path_effects=[withStroke(linewidth=3, foreground="black")],  # legible on any voxels
        )
