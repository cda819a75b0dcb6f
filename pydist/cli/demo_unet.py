"""`pydist demo unet`: learns segmentation from synthetic CT, on 2 ranks, in a few minutes.

Each volume is split into two blocks, one per rank. The trained network is tested on unseen volumes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydist.cli.console import Console
from pydist.cli.data import make_ct
from pydist.cli.demo import prepared
from pydist.cli.options import parse
from pydist.cli.progress import ProgressView
from pydist.cli.train import launch_training
from pydist.errors import PydistError, UsageError
from pydist.launch.backends import backend_named
from pydist.train.config import (
    AdamConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)

if TYPE_CHECKING:
    from pydist.data.medical.options import CTOptions

RANKS = 2
_MULTIPLE = 8
"""Divisor of the voxels along a side: the network halves them three times."""

GOALS = {"liver": 0.90, "tumor": 0.60}
"""Mean Dice over unseen volumes that the demo must reach."""


@dataclass(frozen=True)
class _Arguments:
    """Trains a small 3D U-Net on synthetic CT on 2 ranks, and draws its predictions."""

    folder: Path = Path("runs/demo-unet")
    """Folder of data, log, checkpoint and figure; files of an earlier demo are replaced."""
    volumes: int = 52
    """Number of synthetic CT volumes; a quarter of them is for validation."""
    width: int = 48
    """Voxels along a side of a volume, a multiple of 8."""
    epochs: int = 16
    """Passes over the training set."""
    mpi: str = "auto"
    """Which MPI starts the ranks: openmpi, mpich, gloo (none), or auto."""


def demo_unet(arguments: Sequence[str]) -> int:
    """Runs `pydist demo unet`; see `pydist demo unet --help`."""
    from pydist.train.log import read

    options = parse(_Arguments, arguments, "pydist demo unet")
    if options.width % _MULTIPLE or options.width < 1:
        raise UsageError(f"--width {options.width}: multiples of {_MULTIPLE} are possible")
    # Threads that spin while they wait for each other are very slow on oversubscribed cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    began = time.perf_counter()
    console = Console()
    config, volumes = _config(options), _volumes(options)
    if not round(volumes.count * volumes.validation):
        raise UsageError(f"--volumes {volumes.count}: at least 3 are needed, one to validate with")
    backend_named(options.mpi)
    with prepared(config) as config_file:
        make_ct(config.data.path, volumes, console)
    code = launch_training(config_file, [], RANKS, options.mpi, ProgressView(console))
    if code:
        return code
    folder = options.folder
    last = [event for event in read(folder / "log.jsonl") if event["event"] == "validation"][-1]
    # null in the log: a class that is neither present nor predicted.
    dice = last["dice"]
    found = {name: math.nan if dice[name] is None else dice[name] for name in GOALS}
    told = ", ".join(f"{name} {dice:.3f}" for name, dice in found.items())
    console.print(f"check      Dice on {last['samples']} unseen volumes: {told}")
    console.print(f"result     {folder / 'result.png'}, {folder / 'dice.csv'}", soft_wrap=True)
    console.print(f"finished   in {time.perf_counter() - began:.0f} s")
    console.print(f"next       pydist predict {folder} case.nii.gz -o labels.nii.gz -n 2")
    missed = [name for name, goal in GOALS.items() if not found[name] >= goal]
    if missed and options == _Arguments(folder=folder, mpi=options.mpi):
        goals = ", ".join(f"{name} {GOALS[name]}" for name in missed)
        raise PydistError(f"the demo should reach a Dice of {goals}")
    return 0


def _config(options: _Arguments) -> Config:
    return Config(
        model=UNet3dConfig(features=8),
        data=DataConfig(path=options.folder / "data", normalize="ct"),
        mesh=MeshConfig(spatial=(RANKS, 1, 1)),
        # Few steps for a small network: ten times the paper's rate, and Dice plus cross-entropy,
        # which alone is insensitive to tumors that fill a hundredth of a volume.
        optimizer=AdamConfig(lr=1e-2, decay_epochs=float(options.epochs), end_lr=1e-4),
        train=TrainConfig(epochs=options.epochs, batch=2, loss="dice_ce", validate_every=4),
        checkpoint=CheckpointConfig(resume="never"),
        output=OutputConfig(folder=options.folder),
    )


def _volumes(options: _Arguments) -> CTOptions:
    from pydist.data.medical.options import CTOptions

    return CTOptions(
        count=options.volumes,
        shape=(options.width,) * 3,
        spacing=(256 / options.width,) * 3,
        overwrite=True,
    )
