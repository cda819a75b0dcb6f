"""Defines the table "train" of a configuration: the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pydist.train.config.batch_schedules import BatchScheduleConfig
from pydist.train.config.gradients import GradientsConfig
from pydist.train.config.settings import Count, CountOrZero, Positive, Seed, Table, Weight


@dataclass(frozen=True)
class TrainConfig(Table):
    """Table that configures the training loop."""

    epochs: Count = 100
    """Passes over the training set."""
    steps: Count | None = None
    """Number of steps after which to stop, if that is before the last epoch."""
    batch: Count = 4
    """Samples per step, over all sample groups; with `batch_schedule`, of the first steps."""
    accumulate: Count = 1
    """Passes (forward and backward) over a step's batch, which accumulate its gradient: the same
    step with less memory. Batch norm forms its statistics in each pass."""
    batch_schedule: BatchScheduleConfig = field(default_factory=BatchScheduleConfig)
    """Growth of the batch while the run trains."""
    loss: str = "auto"
    """Loss: by default the squared error for CosmoFlow, cross-entropy for the U-Net (as in the
    paper); "dice" is the mean soft Dice of the classes except background, "dice_ce" the sum of the
    two."""
    class_weights: Annotated[tuple[Weight, ...], Field(min_length=1)] | None = None
    """Weight of each class in the cross-entropy, in the order of the labels, at most 1e6. The mean
    is over the weights of all voxels of the global batch, independent of the distribution."""
    ignore_label: CountOrZero | None = None
    """Label of voxels that are excluded from the loss and the scores: one of the classes, or
    another number, such as 255."""
    seed: Seed = 0
    """Seed of all random numbers: weights, order of the samples, dropout, augmentation."""
    clip_norm: Positive | None = None
    """Norm to which larger gradients are scaled down."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision."""
    gradients: GradientsConfig = "dense"
    """How sample groups average gradients: "dense"; rounded to "fp16" or "bf16"; in two levels, by
    "torus" or "hierarchical" over hosts; compressed, by "powersgd" or "dgc"; or "post_local". Forms
    with settings also as a table, such as {name = "powersgd", rank = 4}."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the network; "auto" is CUDA where each rank has a device and the transport carries
    its memory."""
    channels_last: Literal["auto", "always", "never"] = "auto"
    """Whether input and weights have a channels-last layout; "auto" does so on CUDA devices with
    mixed precision. On CPUs each layer autotunes its layout."""
    tuning: Path | None = None
    """File `tuning.json` of an earlier run, whose choices of kernels this run uses: no autotuning,
    and bit-identical results."""
    cuda_graph: Literal["auto", "always", "never"] = "auto"
    """Whether to capture complete steps as one CUDA graph; "auto" does on one rank, or reports why
    not. On several ranks use "always": a capture that fails there ends the job, with a reason."""
    validate_every: CountOrZero = 1
    """Epochs between validations; 0 validates once, after the last step."""
