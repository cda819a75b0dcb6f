"""Measures how training scales: strong, weak in the batch, weak in the sample, and what limits it.

A point is a network on a mesh, with a batch and a source of data. Each is a job of its own that
trains some steps (`scaling_job`), whose losses are compared with those of one rank.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.data.universes.generate import generate_universes
from pydist.data.universes.options import UniverseOptions
from pydist.grid import Grid
from pydist.packs import pack
from pydist.studies.options import ScalingOptions
from pydist.studies.runs import Run
from pydist.studies.scaling_job import AWAITED, MEMORY
from pydist.train.config import (
    AdamConfig,
    Config,
    CosmoFlowConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)  # fmt: skip
from pydist.train.log import LOG_FILE, read

COSMOFLOW, UNET = "cosmoflow", "unet3d"
STRONG, WEAK_BATCH, WEAK_SAMPLE, CHECK = "strong", "weak in batch", "weak in sample", "one rank"
SPLIT, WHOLE, PACKS, STORE, KEPT = "split files", "whole files", "packs", "store", "synthetic"
"""Sources of data: a file for each sample; a file for the universe that has several; files in a
pack, which `pydist store exec` shows as a folder; the ranks' memory, from which they send each
other blocks; and blocks that each rank keeps, without reading."""
_SAMPLES = 8
"""Samples of a universe, and least samples of a data set."""
_MOST_CHECKED = 8
"""Most ranks' work that one rank repeats, for its losses."""
_CHECKED_STEPS = 4
TOLERANCE = 1e-3
"""Largest relative difference of losses between one rank and several. In float32 the orders of sums
differ, which Adam amplifies; another computation differs by far more."""


@dataclass(frozen=True)
class Point:
    """Training whose speed is measured.

    Attributes:
        network: `COSMOFLOW` or `UNET`.
        series: `STRONG`, `WEAK_BATCH`, `WEAK_SAMPLE`, or `CHECK` for the losses of one rank.
        groups: sample groups.
        parts: of a sample along depth, height and width.
        extents: of a sample.
        batch: samples of a step.
        overlap: whether communication overlaps with computation.
        source: of the data.
    """

    network: str
    series: str
    groups: int
    parts: tuple[int, int, int]
    extents: tuple[int, int, int]
    batch: int
    overlap: bool = True
    source: str = SPLIT

    @property
    def ranks(self) -> int:
        """Number of ranks that the mesh has."""
        return self.groups * math.prod(self.parts)

    @property
    def grid(self) -> Grid:
        """Mesh that the point has."""
        depth, height, width = self.parts
        return Grid.of({"data": self.groups, "depth": depth, "height": height, "width": width})

    @property
    def name(self) -> str:
        """Name that the point's run has."""
        extents = "x".join(map(str, self.extents))
        words = [self.network, self.series, f"{self.ranks}-ranks", extents, f"batch-{self.batch}"]
        words += [] if self.overlap else ["awaited"]
        words += [] if self.source == SPLIT else [self.source]
        return "-".join(words).replace(" ", "-")

    @property
    def alone(self) -> Point:
        """The same steps on one rank, whose losses must be equal."""
        return replace(self, series=CHECK, groups=1, parts=(1, 1, 1), overlap=True, source=SPLIT)


def cuts_for(ranks: int) -> tuple[int, int, int]:
    """Divides a sample among ranks, a power of two: halves of depth, height and width in turn."""
    parts = [1, 1, 1]
    for halving in range(ranks.bit_length() - 1):
        parts[halving % 3] *= 2
    return cast("tuple[int, int, int]", tuple(parts))


@dataclass(frozen=True)
class Scaling:
    """Scaling study that has a folder.

    Attributes:
        folder: of its files.
        options: of the study.
        ranks: largest number of ranks that is measured.
    """

    folder: Path
    options: ScalingOptions
    ranks: int

    @property
    def counts(self) -> list[int]:
        """Numbers of ranks that are measured: powers of two."""
        return [1 << i for i in range(self.ranks.bit_length())]

    def points(self) -> list[Point]:
        """Returns what is measured; one rank comes first, and a check before its points."""
        found: dict[Point, None] = {}
        for network in self.options.networks:
            series = [p for name in (STRONG, WEAK_BATCH, WEAK_SAMPLE)
                      for p in self.series(network, name, self.counts)]  # fmt: skip
            most = [p for p in series if p.series == STRONG][-1]
            for point in (*series, *self._variants(most)):
                if point.series in (WEAK_BATCH, WEAK_SAMPLE) and 1 < point.ranks <= _MOST_CHECKED:
                    found[point.alone] = None
                found[point] = None
        return list(found)

    def series(self, network: str, series: str, counts: Sequence[int]) -> Iterator[Point]:
        """Yields the points of a series; CosmoFlow accepts cubes alone."""
        batch = self.options.batch
        edge = self.options.width if network == COSMOFLOW else self.options.edge
        cube = (edge, edge, edge)
        for count in counts:
            parts = cuts_for(count)
            if series == STRONG:
                yield Point(network, STRONG, 1, parts, cube, batch)
            elif series == WEAK_BATCH and count > 1:
                yield Point(network, WEAK_BATCH, count, (1, 1, 1), cube, batch * count)
            elif series == WEAK_SAMPLE and count > 1:
                larger = cast("tuple[int, int, int]", tuple(edge * n for n in parts))
                if network == UNET or (len(set(larger)) == 1 and larger[0] <= 512):
                    yield Point(network, WEAK_SAMPLE, 1, parts, larger, batch)

    def _variants(self, point: Point) -> Iterator[Point]:
        """Yields a point without overlap, and with other sources of data."""
        if point.ranks > 1:
            yield replace(point, overlap=False)
        # A volume has a file of its own, so that whole files are split ones.
        sources = (WHOLE,) if point.network == COSMOFLOW else ()
        packs = (PACKS,) if sys.platform == "linux" else ()
        for source in (*sources, *packs, STORE, KEPT):
            yield replace(point, source=source)

    def data(self, point: Point) -> Path:
        """Returns the folder of a point's data set."""
        extents = "x".join(map(str, point.extents))
        kind = "whole" if point.source == WHOLE else "split"
        return self.folder / "data" / f"{point.network}-{extents}-{kind}"

    def packed(self, point: Point) -> Path | None:
        """Returns the folder of the pack that a point reads; `None` for other sources."""
        data = self.data(point)
        return data.with_name(f"{data.name}.pack") if point.source == PACKS else None

    def mount(self, point: Point) -> Path:
        """Returns the folder as which a point's pack is shown; it does not exist."""
        return self.folder.resolve() / "mounted" / self.data(point).name

    def make_data(self) -> None:
        """Makes the data sets and packs of all points; complete ones are kept."""
        points = self.points()
        for folder, point in {self.data(p): p for p in points}.items():
            # Epochs of full batches for each point, as its rate counts the samples of full ones.
            samples = math.lcm(_SAMPLES, *(p.batch for p in points if self.data(p) == folder))
            if point.network == COSMOFLOW:
                width = point.extents[0]
                layout: Any = "cosmoflow" if point.source == WHOLE else "channel-first"
                options = UniverseOptions(
                    count=samples // _SAMPLES,
                    width=width,
                    box_width=2 * width,
                    validation=0.0,
                    layout=layout,
                )
                generate_universes(folder, options)
            else:
                generate_ct(folder, CTOptions(count=samples, shape=point.extents, validation=0.0))
        for point in points:
            if (packed := self.packed(point)) is not None:
                pack(self.data(point), packed)

    def run(self, point: Point) -> Run:
        """Returns the run of a point."""
        o = self.options
        model: ModelConfig = UNet3dConfig(features=o.features)
        if point.network == COSMOFLOW:
            width: Any = point.extents[0]
            model = CosmoFlowConfig(width=width)
        config = Config(
            model=model,
            data=DataConfig(
                path=self.mount(point) if point.source == PACKS else self.data(point),
                normalize="log1p" if point.network == COSMOFLOW else "ct",
                store="memory" if point.source == STORE else "off",
            ),
            mesh=MeshConfig(spatial=point.parts, data=point.groups),
            optimizer=AdamConfig(lr=1e-4),
            train=TrainConfig(batch=point.batch),
            output=OutputConfig(folder=self.folder / "runs" / point.name, plot=False),
        )
        return Run(point.name, config, point.ranks)

    def arguments(self, point: Point) -> list[str]:
        """Returns the arguments of `scaling_job` besides the settings."""
        steps = self.options.warmup + self.options.steps
        if point.series == CHECK:
            steps = _CHECKED_STEPS
        flags = [] if point.overlap else [AWAITED]
        return [str(steps), *flags, *([MEMORY] if point.source == KEPT else [])]

    def measured(self, point: Point) -> Measured:
        """Returns what the run of a point has measured."""
        events = [e for e in read(self.run(point).folder / LOG_FILE) if e["event"] == "step"]
        last = {event["step"]: event for event in events}  # a repeated job appends
        ordered = [last[step] for step in sorted(last)]
        counted = ordered if point.series == CHECK else ordered[self.options.warmup :]
        middle = median(event["seconds"] for event in counted)
        nearest = min(counted, key=lambda event: abs(event["seconds"] - middle))
        return Measured(
            point,
            [event["seconds"] for event in counted],
            nearest["parts"],
            [math.nan if event["loss"] is None else event["loss"] for event in ordered],
        )

    def record(self) -> dict[str, Any]:
        """Returns what identifies the study, for `claimed`."""
        options = json.loads(json.dumps(asdict(self.options)))
        return {"study": "scaling", "options": options, "ranks": self.ranks}


@dataclass(frozen=True)
class Measured:
    """Measurement that was made of a point.

    Attributes:
        point: the point.
        seconds: of each measured step, of the slowest rank.
        parts: seconds by part of a step, of the step nearest to the median; see
            `pydist.timers.Timers`.
        losses: of all steps from the first one on.
    """

    point: Point
    seconds: Sequence[float]
    parts: Mapping[str, float]
    losses: Sequence[float]

    @property
    def step(self) -> float:
        """Median seconds that a step takes."""
        return median(self.seconds)

    @property
    def samples_per_second(self) -> float:
        """Samples that are trained on in a second."""
        return self.point.batch / self.step


def scaling_efficiency(point: Point, step: float, alone: float) -> float:
    """Returns the part of the ranks' time that is useful, 1 on one rank.

    Args:
        point: the point.
        step: seconds of its step.
        alone: seconds of the step of one rank, of the series' first point.
    """
    return alone / step / (point.ranks if point.series == STRONG else 1)


def loss_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the largest difference of the losses that both have, relative to the largest loss."""
    count = min(len(one), len(other))
    a, b = np.array(one[:count]), np.array(other[:count])
    return float(np.abs(a - b).max() / np.abs(b).max())  # NaN if one is, unlike Python's max


def loss_differences(found: Sequence[Measured]) -> dict[Point, float | None]:
    """Compares the losses of each point with those of one rank.

    Returns:
        The largest relative difference by point; None where one rank was not to repeat so much.
    """
    losses = {each.point: each.losses for each in found}
    of_one = {p.alone: own for p, own in losses.items() if p.ranks == 1 and p.source == SPLIT}
    return {
        point: loss_difference(own, of_one[point.alone]) if point.alone in of_one else None
        for point, own in losses.items()
        if point.series != CHECK
    }
