"""Shows the results of the scaling study: tables, JSON and figures.

What is measured and what the model says never share a table's line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydist.figures import new_figure
from pydist.grid import AXES
from pydist.hardware import Hardware
from pydist.plan import Estimate
from pydist.studies.file_rates import FileRate, file_rates_table, published_files_table
from pydist.studies.modeled import PaperPoint
from pydist.studies.published import PUBLISHED, PUBLISHED_FILES
from pydist.studies.scaling import (
    CHECK,
    COSMOFLOW,
    SPLIT,
    STRONG,
    TOLERANCE,
    WEAK_BATCH,
    WEAK_SAMPLE,
    Measured,
    Point,
    Scaling,
    loss_differences,
    scaling_efficiency,
)  # fmt: skip
from pydist.tables import table
from pydist.train.report import publish_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MS = 1e3
_SERIES = (STRONG, WEAK_BATCH, WEAK_SAMPLE)
_NAMES = {COSMOFLOW: "CosmoFlow", "unet3d": "U-Net"}
_COLORS = dict(zip(_SERIES, ("tab:blue", "tab:orange", "tab:green"), strict=True))
_KINDS = {
    "computation": {"compute", "convolution", "dgrad", "wgrad", "boundary"},
    "halo": {"halo", "pack"},
    "sums": {"statistics", "redistribute", "channels", "gather"},
    "gradients": {"gradients"},
    "optimizer": {"optimizer"},
    "data": {"data", "reading"},
}
"""Parts of a step in the figure: of `pydist.timers.Timers`, and of `pydist.plan.estimate.PARTS`."""


@dataclass(frozen=True)
class ScalingResults:
    """Results that the study has.

    Attributes:
        measured: the points that ran.
        modeled: estimates of the series, also beyond the ranks that ran.
        hardware: that the estimates assume.
        paper: the paper's experiments, by the model of a V100.
        files: modeled rates of reading files.
    """

    measured: Sequence[Measured]
    modeled: Mapping[Point, Estimate]
    hardware: Hardware
    paper: Sequence[PaperPoint]
    files: Sequence[FileRate] = ()

    def alone(self, point: Point) -> float:
        """Returns the measured seconds of the step of one rank, from which a series starts."""
        return next(each.step for each in self.measured if _starts(each.point, point.network))

    def modeled_alone(self, point: Point) -> float:
        """Returns the modeled seconds of that step."""
        return next(
            found.step for each, found in self.modeled.items() if _starts(each, point.network)
        )


def _starts(point: Point, network: str) -> bool:
    return (
        (point.network, point.series, point.ranks) == (network, STRONG, 1)
        and point.overlap
        and point.source == SPLIT
    )


def tables(results: ScalingResults) -> Iterator[str]:
    """Yields all tables, each in lines."""
    yield measured_table(results)
    yield modeled_table(results)
    yield paper_table(results.paper)
    yield published_table()
    yield file_rates_table(results.files, results.hardware.name)
    yield published_files_table()


def measured_table(results: ScalingResults) -> str:
    """Formats what was measured, with the efficiency at each count."""
    differ = loss_differences(results.measured)
    lines: list[tuple[str, ...]] = [
        ("measured", "series", "mesh", "voxels", "batch", "overlap", "data from", "ms", "samples/s",
         "effic.", "losses")
    ]  # fmt: skip
    for each in results.measured:
        point = each.point
        if point.series == CHECK:
            continue
        useful = scaling_efficiency(point, each.step, results.alone(point))
        lines.append(
            (
                _NAMES[point.network], point.series, str(point.grid), _extents(point),
                str(point.batch), "on" if point.overlap else "off", point.source,
                f"{_MS * each.step:.4g}", f"{each.samples_per_second:.4g}", f"{useful:.0%}",
                _losses(differ[point]),
            )
        )  # fmt: skip
    return table(lines, left=4)


def _extents(point: Point) -> str:
    edges = set(point.extents)
    return f"{point.extents[0]}³" if len(edges) == 1 else "×".join(map(str, point.extents))


def _losses(found: float | None) -> str:
    if found is None:
        return "not compared"
    return f"equal to {found:.0e}" if found <= TOLERANCE else f"differ by {found:.0e}"


def unequal(results: ScalingResults) -> list[str]:
    """Returns the names of points whose losses are not those of one rank."""
    found = loss_differences(results.measured)
    return [p.name for p, value in found.items() if value is not None and not value <= TOLERANCE]


def modeled_table(results: ScalingResults) -> str:
    """Formats what the model says of the series."""
    lines: list[tuple[str, ...]] = [
        ("modeled", "series", "mesh", "voxels", "batch", "ms", "samples/s", "effic.", "most time")
    ]
    for point, found in results.modeled.items():
        useful = scaling_efficiency(point, found.step, results.modeled_alone(point))
        lines.append(
            (
                _NAMES[point.network], point.series, str(point.grid), _extents(point),
                str(point.batch), f"{_MS * found.step:.4g}", f"{found.samples_per_second:.4g}",
                f"{useful:.0%}", found.limit,
            )
        )  # fmt: skip
    return table(lines, left=4)


def paper_table(paper: Sequence[PaperPoint]) -> str:
    """Formats the paper's experiments by the model, at powers of four and the largest count."""
    lines: list[tuple[str, ...]] = [
        ("modeled, V100", "series", "GPUs", "mesh", "batch", "ms", "samples/s", "effic.",
         "GiB", "most time")
    ]  # fmt: skip
    last = {(p.network, p.edge, p.series): p for p in paper}
    first = {(p.network, p.edge, p.series): p for p in reversed(paper)}
    for point in paper:
        key = (point.network, point.edge, point.series)
        shown = math.log2(point.gpus) % 2 == 0 or point in (last[key], first[key])
        if not shown:
            continue
        found = point.estimate
        lines.append(
            (
                f"{_NAMES[point.network]} {point.edge}³", point.series, str(point.gpus),
                str(found.grid), str(found.batch), f"{_MS * found.step:.4g}",
                f"{found.samples_per_second:.4g}", f"{point.efficiency:.0%}",
                f"{found.peak / 2**30:.1f}", found.limit,
            )
        )  # fmt: skip
    return table(lines, left=2)


def published_table() -> str:
    """Formats the public measurements."""
    lines: list[tuple[str, ...]] = [("published, 128³", "network", "GPUs", "samples/s", "per GPU")]
    lines += [
        (each.run, each.network, str(each.gpus), f"{each.samples_per_second:,.0f}",
         f"{each.samples_per_second / each.gpus:.1f}")
        for each in PUBLISHED
    ]  # fmt: skip
    return table(lines, left=2)


def scaling_record(study: Scaling, results: ScalingResults) -> dict[str, Any]:
    """Returns the results as JSON holds them."""
    differ = loss_differences(results.measured)
    measured = [
        {**_facts(each.point), "seconds": list(each.seconds), "step": each.step,
         "samples_per_second": each.samples_per_second, "parts": dict(each.parts),
         "efficiency": scaling_efficiency(each.point, each.step, results.alone(each.point)),
         "difference_of_losses": differ[each.point]}
        for each in results.measured if each.point.series != CHECK
    ]  # fmt: skip
    modeled = [
        {**_facts(point), **_estimate(found),
         "efficiency": scaling_efficiency(point, found.step, results.modeled_alone(point))}
        for point, found in results.modeled.items()
    ]  # fmt: skip
    paper = [
        {"network": p.network, "edge": p.edge, "series": p.series, "gpus": p.gpus,
         "batch": p.estimate.batch, "efficiency": p.efficiency, **_estimate(p.estimate)}
        for p in results.paper
    ]  # fmt: skip
    published = [each._asdict() for each in PUBLISHED]
    files = [each._asdict() for each in results.files]
    published_files = [each._asdict() for each in PUBLISHED_FILES]
    return {**study.record(), "hardware": results.hardware.name, "measured": measured,
            "modeled": modeled, "paper": paper, "published": published, "files": files,
            "published_files": published_files}  # fmt: skip


def _facts(point: Point) -> dict[str, Any]:
    return {"network": point.network, "series": point.series, "ranks": point.ranks,
            "mesh": _mesh(point.grid.shape), "extents": point.extents, "batch": point.batch,
            "overlap": point.overlap, "source": point.source}  # fmt: skip


def _estimate(found: Estimate) -> dict[str, Any]:
    return {"mesh": _mesh(found.grid.shape), "step": found.step, "seconds": dict(found.seconds),
            "samples_per_second": found.samples_per_second, "peak": found.peak}  # fmt: skip


def _mesh(shape: Sequence[int]) -> dict[str, int]:
    return dict(zip(AXES, shape, strict=True))


def draw_scaling(study: Scaling, results: ScalingResults) -> Path:
    """Draws `result.png`: speed-up and parts of the time, measured and modeled.

    Raises:
        UsageError: matplotlib is not installed.
        DiskError: the file can't be written.
    """
    networks = study.options.networks
    figure = new_figure(16, 4.2 * len(networks) + 4.4)
    rows = figure.subplots(len(networks) + 1, 3)
    for (speed, measured, modeled), network in zip(rows, networks, strict=False):
        _draw_speed(speed, results, network)
        shown = [e for e in results.measured if e.point.network == network
                 and e.point.series != CHECK]  # fmt: skip
        _draw_parts(measured, [(_label(e.point), e.parts) for e in shown])
        measured.set(title=f"{_NAMES[network]}: measured step", ylabel="ms")
        estimates = [(p, e) for p, e in results.modeled.items() if p.network == network]
        _draw_parts(modeled, [(_label(p), e.seconds) for p, e in estimates])
        modeled.set(title=f"{_NAMES[network]}: modeled step", ylabel="ms")
    for axes, series in zip(rows[-1], (STRONG, WEAK_BATCH), strict=False):
        _draw_paper(axes, [p for p in results.paper if p.series == series], series)
    _draw_published(rows[-1][2])
    return publish_figure(figure, study.folder / "result.png")


def _label(point: Point) -> str:
    words = [point.series, f"{point.ranks} rank{'s' if point.ranks > 1 else ''}"]
    words += [] if point.overlap else ["no overlap"]
    words += [] if point.source == SPLIT else [point.source]
    return ", ".join(words)


def _draw_speed(axes: Axes, results: ScalingResults, network: str) -> None:
    counts = [p.ranks for p in results.modeled if p.network == network]
    axes.plot([1, max(counts)], [1, max(counts)], color="gray", linewidth=1, linestyle=":",
              label="ideal")  # fmt: skip
    for series, color in _COLORS.items():
        curve = sorted(_speeds(results, network, series, measured=False))
        points = sorted(_speeds(results, network, series, measured=True))
        if curve:
            axes.plot(*zip(*curve, strict=True), "--", color=color, label=f"{series}, modeled")
        if len(points) > 1:  # besides the one rank of all series
            axes.plot(*zip(*points, strict=True), "o", color=color, label=f"{series}, measured")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="speed-up",
             title=f"{_NAMES[network]}: speed-up")  # fmt: skip
    axes.legend(fontsize=7)


def _speeds(
    results: ScalingResults, network: str, series: str, measured: bool
) -> Iterator[tuple[int, float]]:
    """Yields ranks and speed-up of a series from one rank on."""
    steps = (
        {e.point: e.step for e in results.measured}
        if measured
        else {point: found.step for point, found in results.modeled.items()}
    )
    for point, step in steps.items():
        usual = point.overlap and point.source == SPLIT
        if not usual or point.network != network:
            continue
        if point.series == series or _starts(point, network):
            alone = results.alone(point) if measured else results.modeled_alone(point)
            yield point.ranks, point.ranks * scaling_efficiency(point, step, alone)


def _draw_parts(axes: Axes, bars: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    bottom = [0.0] * len(bars)
    for kind, parts in _KINDS.items():
        heights = [_MS * sum(s for part, s in own.items() if part in parts) for _, own in bars]
        axes.bar(range(len(bars)), heights, bottom=bottom, label=kind)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(bars)), [label for label, _ in bars], rotation=60, ha="right",
                    fontsize=6)  # fmt: skip
    axes.legend(fontsize=7)


def _draw_paper(axes: Axes, points: Sequence[PaperPoint], series: str) -> None:
    for key in dict.fromkeys((p.network, p.edge) for p in points):
        own = [p for p in points if (p.network, p.edge) == key]
        rates = [p.estimate.samples_per_second for p in own]
        (line,) = axes.plot([p.gpus for p in own], rates, "--",
                            label=f"{_NAMES[key[0]]} {key[1]}³")  # fmt: skip
        ideal = [rates[0] * p.gpus / own[0].gpus for p in own]
        axes.plot([p.gpus for p in own], ideal, ":", color=line.get_color(), linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="samples/s",
             title=f"Modeled, V100 on Lassen: {series}")  # fmt: skip
    axes.legend(fontsize=7)


def _draw_published(axes: Axes) -> None:
    for run in dict.fromkeys(each.run for each in PUBLISHED):
        own = [each for each in PUBLISHED if each.run == run]
        axes.plot([e.gpus for e in own], [e.samples_per_second for e in own], "s-", label=run)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="samples/s",
             title="Published, CosmoFlow 128³ (other networks)")  # fmt: skip
    axes.legend(fontsize=6)
