"""Defines the options of the studies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydist.data.universes.options import UniverseOptions
from pydist.errors import UsageError

CUTS = (1, 2, 4)
"""Parts of a cube along each side: whole, sub-cubes of 1/8 and of 1/64 of the volume."""


@dataclass(frozen=True)
class SampleSizeOptions:
    """Options that the study has.

    Attributes:
        universes: number of synthetic universes.
        width: voxels along a side of a universe, a multiple of 4.
        cell: side of a voxel, Mpc/h.
        validation: fraction of the universes on which errors are measured.
        seeds: trainings of each input, which differ in weights and order; 3 or more show a spread.
        epochs: passes over all voxels.
        batch: universes in a step; of sub-cubes as many as they have voxels.
        lr: learning rate, which decreases linearly to zero.
        features: channels of the network's first convolution; each level doubles them.
        levels: convolutions of the network, each with a pooling.
    """

    universes: int = 320
    width: int = 32
    cell: float = 4.0
    validation: float = 0.25
    seeds: int = 3
    epochs: int = 20
    batch: int = 4
    lr: float = 2e-3
    features: int = 8
    levels: int = 3

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch", "features", "levels"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}: at least 1")
        if self.width % CUTS[-1] or self.width < 2 * CUTS[-1]:
            raise UsageError(f"width = {self.width}: multiples of 4 from 8 on are possible")
        if 1 << self.levels > self.width:  # the next one would pool a single voxel
            most = self.width.bit_length() - 1
            raise UsageError(
                f"levels = {self.levels}: at most {most} halve a cube of {self.width} voxels"
            )
        if not self.lr > 0:
            raise UsageError(f"lr = {self.lr}: a positive number")
        held_out = self.universe_options.validation_count
        if held_out < 2 or self.universes - held_out < max(self.batch, 2):
            raise UsageError(
                f"universes = {self.universes} with validation = {self.validation}: "
                f"{self.universes - held_out} to train on and {held_out} to validate; at least "
                f"{max(self.batch, 2)} and 2 are needed"
            )

    @property
    def universe_options(self) -> UniverseOptions:
        """Options that the universes are made with."""
        return UniverseOptions(
            count=self.universes,
            width=self.width,
            box_width=self.width,
            cell=self.cell,
            validation=self.validation,
        )


@dataclass(frozen=True)
class ScalingOptions:
    """Options that the study has.

    Attributes:
        networks: what is trained.
        width: edge of CosmoFlow's cubes on one rank.
        edge: edge of the U-Net's volumes on one rank, a multiple of 8.
        features: channels of the U-Net's first level.
        batch: samples of a step on one rank.
        steps: measured steps of a point.
        warmup: steps before them, in which convolutions are autotuned.
    """

    networks: tuple[Literal["cosmoflow", "unet3d"], ...] = ("cosmoflow", "unet3d")
    width: Literal[32, 64, 128, 256, 512] = 64
    edge: int = 32
    features: int = 16
    batch: int = 2
    steps: int = 8
    warmup: int = 15

    def __post_init__(self) -> None:
        for name in ("features", "batch", "steps", "warmup"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}: at least 1")
        if self.edge < 8 or self.edge % 8:
            raise UsageError(f"edge = {self.edge}: multiples of 8 are possible")
        if not self.networks or len(set(self.networks)) < len(self.networks):
            raise UsageError(f"networks = {self.networks}: each once, at least one")
