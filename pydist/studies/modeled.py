"""Draws scaling by the cost model: of the measured series, and of the paper's experiments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.grid import Grid
from pydist.hardware import Hardware, this_machine
from pydist.models import CosmoFlow, UNet3d
from pydist.plan import Estimate, StepModel, Trace, Training, estimate_step, trace_network
from pydist.plan.kept import KeptConvs
from pydist.studies.options import ScalingOptions
from pydist.studies.scaling import COSMOFLOW, STRONG, UNET, WEAK_BATCH, WEAK_SAMPLE, Point, Scaling

MOST_GPUS = 2048
_STRONG_BATCH = 64
"""Samples of a step in the strong series. The paper's own numbers are not public."""
EXPERIMENTS = ((COSMOFLOW, 128), (COSMOFLOW, 256), (COSMOFLOW, 512), (UNET, 256))
"""Networks and edges of the paper's experiments, to 2,048 GPUs."""
_PAPER_FEATURES = 64


@cache
def _trace(network: str, extents: tuple[int, int, int], features: int) -> Trace:
    with torch.device("meta"):
        model: nn.Module
        if network == COSMOFLOW:
            model = CosmoFlow(extents[0])
            return trace_network(model, (4, *extents), lambda output: output.square().mean())
        model = UNet3d(features=features)
        return trace_network(model, (1, *extents), _cross_entropy)


def _cross_entropy(scores: Tensor) -> Tensor:
    labels = torch.zeros(scores.shape[0], *scores.shape[2:], dtype=torch.int64)
    return F.cross_entropy(scores, labels)


def _model(trace: Trace, training: Training, hardware: Hardware) -> StepModel:
    if hardware.machine == this_machine():  # the convolutions that the measured jobs have kept
        return StepModel(trace, training, hardware, KeptConvs(hardware.threads, measures=False))
    return StepModel(trace, training, hardware)


def modeled(point: Point, options: ScalingOptions, hardware: Hardware) -> Estimate:
    """Estimates a step of a point of the scaling study.

    Args:
        point: the point.
        options: of the study.
        hardware: of a rank.
    """
    trace = _trace(point.network, point.extents, options.features)
    channels = 4 if point.network == COSMOFLOW else 1
    stored = channels * math.prod(point.extents) * 2  # int16
    training = Training(batch=point.batch, prefetch=2, file_bytes=stored)
    return estimate_step(_model(trace, training, hardware), point.grid)


def series_estimates(study: Scaling, most: int, hardware: Hardware) -> dict[Point, Estimate]:
    """Estimates the series of a scaling study on 1, 2, 4, ... ranks.

    Args:
        study: the study.
        most: largest number of ranks.
        hardware: of a rank.
    """
    counts = [1 << i for i in range(most.bit_length())]
    return {
        point: modeled(point, study.options, hardware)
        for network in study.options.networks
        for series in (STRONG, WEAK_BATCH, WEAK_SAMPLE)
        for point in study.series(network, series, counts)
    }


@dataclass(frozen=True)
class PaperPoint:
    """Step of one of the paper's experiments, as the model predicts it when data are in the store.

    Attributes:
        network: of `EXPERIMENTS`.
        edge: of the samples.
        series: `STRONG` or `WEAK_BATCH`.
        estimate: on the fastest mesh that fits into memory.
        efficiency: samples per second and GPU, relative to the series' first point.
    """

    network: str
    edge: int
    series: str
    estimate: Estimate
    efficiency: float

    @property
    def gpus(self) -> int:
        """Number of GPUs that the mesh has."""
        return math.prod(self.estimate.grid.shape)


def paper_points(hardware: Hardware) -> Iterator[PaperPoint]:
    """Yields the paper's experiments, of 1 to 2,048 GPUs, from the fewest on which a sample fits.

    Strong: a batch of 64. Weak: a sample for so many GPUs as it needs to fit.

    Args:
        hardware: of a GPU.
    """
    for network, edge in EXPERIMENTS:
        trace = _trace(network, (edge, edge, edge), _PAPER_FEATURES)
        for series in (STRONG, WEAK_BATCH):
            first: Estimate | None = None
            least = _least_ranks(trace, hardware)
            for gpus in (1 << i for i in range(MOST_GPUS.bit_length())):
                batch = _STRONG_BATCH if series == STRONG else gpus // least
                if batch < 1:
                    continue
                found = _best(trace, hardware, gpus, batch, least)
                if found is None:
                    continue
                first = first or found
                yield PaperPoint(network, edge, series, found, _relative(found, first))


def _relative(found: Estimate, first: Estimate) -> float:
    """Returns samples per second and rank, relative to those of another estimate."""
    ranks, ranks_of_first = (math.prod(each.grid.shape) for each in (found, first))
    rate, rate_of_first = found.samples_per_second, first.samples_per_second
    return rate / ranks * ranks_of_first / rate_of_first


def _least_ranks(trace: Trace, hardware: Hardware) -> int:
    """Returns the fewest ranks, a power of two, into which a sample fits."""
    model = _model(trace, Training(batch=1), hardware)
    for ranks in (1 << i for i in range(MOST_GPUS.bit_length())):
        if any(estimate_step(model, grid).peak <= hardware.memory for grid in _splits(ranks, 1)):
            return ranks
    return MOST_GPUS


def _best(trace: Trace, hardware: Hardware, gpus: int, batch: int, least: int) -> Estimate | None:
    """Returns the fastest step on some GPUs that fits into memory."""
    found: list[Estimate] = []
    for groups in (1 << i for i in range(gpus.bit_length())):
        parts = gpus // groups
        if groups > batch or parts < least:
            continue
        # Samples of a group that do not fit together go through the network one after the other.
        training = Training(batch=batch, passes=max(1, batch // groups))
        model = _model(trace, training, hardware)
        found += [estimate_step(model, grid) for grid in _splits(parts, groups)]
    fitting = [each for each in found if each.peak <= hardware.memory]
    return min(fitting, key=lambda each: each.step, default=None)


def _splits(parts: int, groups: int) -> Iterator[Grid]:
    """Yields ways to divide a sample by halves: the depth alone, or up to three dims evenly."""
    halvings = parts.bit_length() - 1
    shapes = {(halvings, 0, 0), _even(halvings, 2), _even(halvings, 3)}
    for depth, height, width in sorted(shapes, reverse=True):
        sizes = {"depth": 1 << depth, "height": 1 << height, "width": 1 << width}
        yield Grid.of({"data": groups, **sizes})


def _even(halvings: int, dims: int) -> tuple[int, int, int]:
    counts: Sequence[int] = [halvings // dims + (i < halvings % dims) for i in range(dims)]
    depth, height, width = (*counts, 0)[:3]
    return depth, height, width
