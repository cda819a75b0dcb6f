"""Describes what is planned, and the estimate of a training step on a mesh.

Source of the structure: the performance model of the paper's authors (DiHydrogen's perfmodel.py,
and the overlap of their implementation). Per layer, the halo is hidden by the main convolution;
the reduction of gradients by the rest of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pydist.backend.conv_kernels import ConvKernels
from pydist.backend.problem import ConvProblem
from pydist.grid import Grid
from pydist.hardware import Hardware
from pydist.plan.memory import ActivationSweep
from pydist.plan.placement import Cuts
from pydist.plan.trace import Trace


class ConvTimes(NamedTuple):
    """Seconds that a convolution's forward, dgrad and wgrad take, and the kernels it uses.

    Attributes:
        forward: seconds of the forward pass.
        dgrad: of the input's gradient.
        wgrad: of the weight's gradient.
        kernels: that compute it.
        ranks: number of ranks that computed at the same time when these were measured.
    """

    forward: float
    dgrad: float
    wgrad: float
    kernels: ConvKernels
    ranks: int


KeptSeconds = Callable[[ConvProblem, int], ConvTimes | None]
"""Returns the times of a convolution, given the number of ranks of a host that compute at the same
time; `None` if they are unknown."""

PARTS_OF_CALLS = ("compute", "halo", "channels", "statistics", "gather", "waiting")
PARTS = (*PARTS_OF_CALLS, "gradients", "optimizer", "reading")
"""What takes the time of a step: computation of layers; halos; sums and gathers of channels; sums
of norms; gathering a sample for layers without a spatial dim; waiting for slower ranks and other
stages; the reduction of gradients; the optimizer's step; files. Messages count as far as
computation does not hide them, and files as far as the rest of the step does not."""


@dataclass(frozen=True)
class Training:
    """Training that is planned, besides its network.

    Attributes:
        batch: samples of a step, of all groups.
        passes: in which a step's samples go through the network.
        state: bytes of the optimizer's state per byte of parameters: 2 for Adam, 1 with momentum.
        dtype: in which convolutions of a network in float32 compute, as under autocast.
        partitioned: whether the optimizer is partitioned over the ranks (ZeRO-1).
        prefetch: batches that are read ahead.
        file_bytes: of a sample in its files; 0 without files.
    """

    batch: int = 1
    passes: int = 1
    state: float = 2.0
    dtype: torch.dtype = torch.float32
    partitioned: bool = False
    prefetch: int = 0
    file_bytes: int = 0

    @property
    def most_groups(self) -> int:
        """Returns the most sample groups: each has a sample in a pass."""
        return max(1, self.batch // self.passes)


@dataclass(frozen=True)
class InStages:
    """Stages that a network is divided into, on equal meshes.

    Attributes:
        stages: their number.
        micro_batches: parts of a sample group's batch.
        schedule: name of their order, see `pydist.stages.schedule`.
    """

    stages: int
    micro_batches: int
    schedule: str

    def __str__(self) -> str:
        count = f"{self.micro_batches} micro-batch{'' if self.micro_batches == 1 else 'es'}"
        return f"{self.stages} stages, {count}, {self.schedule}"


@dataclass(frozen=True)
class Estimate:
    """Estimate that describes a training step on a mesh, or in stages.

    Attributes:
        grid: the mesh; in stages that of each.
        batch: samples of a step.
        seconds: of the slowest rank, by `PARTS`; in stages of one on the busiest mesh.
        memory: bytes of the largest rank by kind, see `pydist.plan.memory.KINDS`.
        gathered: layers whose thin blocks the ranks gather, by the paths of their modules.
        on_channels: layers whose channels the ranks split over spatial axes, as blocks were thin.
        in_stages: the stages, if there are several.
    """

    grid: Grid
    batch: int
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    gathered: tuple[str, ...] = ()
    on_channels: tuple[str, ...] = ()
    in_stages: InStages | None = None

    def __str__(self) -> str:
        if self.in_stages is None:
            return str(self.grid)
        one = self.grid.size() == 1
        return f"{self.in_stages}" if one else f"{self.grid} × {self.in_stages}"

    @property
    def ranks(self) -> int:
        """Number of ranks that the mesh, or all stages, have."""
        return self.grid.size() * (1 if self.in_stages is None else self.in_stages.stages)

    @property
    def bubble(self) -> float:
        """Part of the step in which a rank of the busiest stage waits for other ranks."""
        return self.seconds["waiting"] / self.step

    @property
    def step(self) -> float:
        """Seconds that a step takes."""
        return sum(self.seconds.values())

    @property
    def peak(self) -> float:
        """Bytes that the largest rank needs."""
        return sum(self.memory.values())

    @property
    def samples_per_second(self) -> float:
        """Samples that are trained on in a second."""
        return self.batch / self.step

    @property
    def limit(self) -> str:
        """Part of the step that takes most time."""
        return max(self.seconds, key=self.seconds.__getitem__)


class StepModel:
    """Model that has what the estimate of a step needs for any mesh.

    Args:
        trace: of the network.
        training: what is trained, and how.
        hardware: of a rank.
        kept: measured seconds of convolutions, where they are known.
    """

    def __init__(
        self,
        trace: Trace,
        training: Training,
        hardware: Hardware,
        kept: KeptSeconds = lambda problem, ranks: None,
    ) -> None:
        self.trace, self.training, self.hardware, self.kept = trace, training, hardware, kept
        self.cuts = Cuts(trace)
        self.sweep = ActivationSweep(trace)
        given = trace.dtype
        self.dtype = training.dtype if given == torch.float32 else given
        self.flops = hardware.flops_of(self.dtype)
        # Activations under autocast; a trace has the input's dtype.
        self.narrow = min(1.0, self.dtype.itemsize / given.itemsize)
