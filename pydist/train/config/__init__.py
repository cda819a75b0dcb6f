"""Defines the configuration of a training run: one dataclass per table of the file.

They are plain dataclasses, so that library users can build them in code; the file and the command
line are checked against the same annotations (`pydist.train.config_io`). Nothing here imports
torch, so that `pydist train --help` answers quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pydist.train.config.batch_schedules import BatchScheduleConfig
from pydist.train.config.data import DataConfig
from pydist.train.config.mesh import MeshConfig, SharesConfig, StageConfig, StagesConfig
from pydist.train.config.model import CosmoFlowConfig, FactoryConfig, ModelConfig, UNet3dConfig
from pydist.train.config.optimizers import (
    AdamConfig,
    LambConfig,
    LarsConfig,
    LayerwiseConfig,
    OptimizerConfig,
    SgdConfig,
)  # fmt: skip
from pydist.train.config.settings import (
    LARGEST,
    Count,
    CountOrZero,
    Flag,
    Fraction,
    Number,
    Positive,
    Size,
    Table,
)  # fmt: skip
from pydist.train.config.train import TrainConfig

# With the types of settings, for tables of other packages.
__all__ = [
    "AdamConfig", "BatchScheduleConfig", "CheckpointConfig", "Config", "CosmoFlowConfig", "Count",
    "CountOrZero", "DataConfig", "FactoryConfig", "Flag", "Fraction", "LambConfig", "LarsConfig",
    "LayerwiseConfig", "MeshConfig", "ModelConfig", "Number", "OptimizerConfig", "OutputConfig",
    "Positive", "SgdConfig", "SharesConfig", "Size", "StageConfig", "StagesConfig", "TrainConfig",
    "UNet3dConfig",
]  # fmt: skip


Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class CheckpointConfig(Table):
    """Table that configures checkpoints."""

    every: CountOrZero = 0
    """Steps between checkpoints; 0 saves at the end of every epoch."""
    keep: Annotated[int, Field(ge=2, le=LARGEST, strict=True)] = 2
    """Number of latest checkpoints to keep."""
    resume: Resume = "auto"
    """Whether to resume from the last checkpoint: "auto" if there is one, "must" with an error
    without one, "never" to start from scratch."""
    on_error: Literal["stop", "warn"] = "stop"
    """Whether a checkpoint that can't be written (disk full) ends the run."""


@dataclass(frozen=True)
class OutputConfig(Table):
    """Table that configures the run's output."""

    folder: Path = Path("runs/cosmoflow")
    """Folder of config.toml, log.jsonl, ckpt/ and pictures."""
    plot: Flag = True
    """Whether to draw progress.png (loss, measures, learning rate) and a sample in each epoch, and
    result.png at the end, if matplotlib is installed."""
    tensorboard: Flag = False
    """Whether to write the curves for TensorBoard as well, to the folder "tensorboard"."""


@dataclass(frozen=True)
class Config(Table):
    """Tables that configure a training run."""

    model: ModelConfig = field(default_factory=CosmoFlowConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
