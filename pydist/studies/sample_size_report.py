"""Shows the results of the study of sample sizes: a table, JSON, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pydist.data.universes.options import TARGET_NAMES
from pydist.figures import new_figure
from pydist.studies.options import CUTS
from pydist.studies.sample_size import CONSTANT, NETWORK, RIDGE, Row, Study
from pydist.tables import table
from pydist.train.report import publish_figure

_SIZES = {1: "whole", 2: "1/8", 4: "1/64"}
_COLORS = {NETWORK: "tab:blue", RIDGE: "tab:orange"}


def table_of(study: Study, rows: Sequence[Row]) -> str:
    """Formats mean squared errors, with their standard deviation over the seeds."""
    lines: list[tuple[str, ...]] = [("predictor", "input", "seeds", "mean", *TARGET_NAMES)]
    for row in rows:
        errors = np.array(row.errors)
        columns = np.column_stack([errors.mean(1), errors])
        lines.append((row.predictor, _input(study, row), str(len(errors)), *map(_cell, columns.T)))
    return table(lines, left=2)


def _input(study: Study, row: Row) -> str:
    if row.predictor == CONSTANT:
        return "none"
    kind = f"{_SIZES[row.cut]}: {study.options.width // row.cut}³"
    return f"{kind}, mean of {row.cut**3}" if row.averaged else kind


def _cell(values: Any) -> str:
    spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{spread}"


def conclusion(rows: Sequence[Row]) -> list[str]:
    """Returns how the network's error grows as samples shrink: ratio with spread, one line each."""
    found = {(row.cut, row.averaged): np.mean(row.errors, 1) for row in rows
             if row.predictor == NETWORK}  # fmt: skip
    lines = []
    for cut in CUTS[1:]:
        for of_universe in (False, True):
            ratios = found[cut, of_universe] / found[1, False]
            what = f"{_SIZES[cut]}{', averaged over the universe' if of_universe else ''}"
            spread = f" ± {ratios.std(ddof=1):.2f}" if len(ratios) > 1 else ""
            larger = sum(r > 1 for r in ratios)
            lines.append(
                f"error of {what}: {ratios.mean():.2f}{spread} times that of whole cubes "
                f"(larger with {larger} of {len(ratios)} seeds)"
            )
    return lines


def sizes_record(study: Study, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the results as JSON holds them."""
    return {
        **study.record(),
        "outputs": TARGET_NAMES,
        "rows": [{**asdict(row), "mean": row.mean, "spread": row.spread} for row in rows],
    }


def draw_sizes(study: Study, rows: Sequence[Row]) -> Path:
    """Draws `result.png` in the study's folder: the error of each output by the input's size.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file can't be written.
    """
    names = ("mean", *TARGET_NAMES)
    figure = new_figure(3 * len(names), 3.6)
    panels = figure.subplots(1, len(names))
    constant = next(row for row in rows if row.predictor == CONSTANT)
    places = range(len(CUTS))
    for number, (axes, name) in enumerate(zip(panels, names, strict=True)):
        axes.axhline(_columns(constant)[number].mean(), color="gray", linewidth=1, linestyle=":",
                     label="training mean")  # fmt: skip
        for predictor, color in _COLORS.items():
            for averaged, style in ((False, "-"), (True, "--")):
                chosen = [_row(rows, predictor, cut, averaged) for cut in CUTS]
                values = [_columns(row)[number] for row in chosen]
                label = f"{predictor}{', averaged over a universe' if averaged else ''}"
                axes.plot(places, [v.mean() for v in values], style, color=color, label=label)
                for place, each in zip(places, values, strict=True):
                    axes.plot([place] * len(each), each, "o", color=color, markersize=4,
                              fillstyle="none" if averaged and place else "full")  # fmt: skip
        sizes = [f"{_SIZES[cut]}\n{study.options.width // cut}³" for cut in CUTS]
        axes.set(title=name, yscale="log", xticks=list(places))
        axes.set_xticklabels(sizes)
    panels[0].set(ylabel="MSE of validation universes")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    return publish_figure(figure, study.folder / "result.png")


def _columns(row: Row) -> Any:
    """Returns errors by column of the table, [1 + outputs, seeds]."""
    errors = np.array(row.errors)
    return np.column_stack([errors.mean(1), errors]).T


def _row(rows: Sequence[Row], predictor: str, cut: int, averaged: bool) -> Row:
    """Returns a row; whole cubes have nothing to average."""
    wanted = (predictor, cut, averaged and cut > 1)
    return next(row for row in rows if (row.predictor, row.cut, row.averaged) == wanted)
