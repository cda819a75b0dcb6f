"""Defines the options of `pydist predict`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pydist.data.trust import FileTrust


@dataclass(frozen=True)
class Arguments:
    """Predicts NIfTI volumes, NumPy files or the samples of a data set with a trained network.

    Each NIfTI volume is partitioned over the ranks, and its labels are written on its own grid.
    NumPy files, [C, D, H, W] or [C, H, W], and the samples of a data set are dealt out to the
    ranks. Of a regression or classification the output is a table.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run, or one of its checkpoints."""
    images: tyro.conf.Positional[tuple[Path, ...]]
    """A volume's files, one per channel, or its folder with a DICOM series; or a folder of volumes,
    whose files end in _0000, _0001, ... where there are several channels. Or .npy files, a folder
    of them, or a data set."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Labels: a file ending in .nii or .nii.gz, or a folder if the images are in one. Of NumPy
    files and data sets: a .csv file for values and classes of samples, a folder for labels."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of ranks to start on this machine."""
    mpi: str = "auto"
    """Which MPI starts them: openmpi, mpich, gloo (none), or auto."""
    spatial: tuple[int, int, int] | None = None
    """Number of parts along depth, height and width; by default the depth of NIfTI volumes is split
    over all ranks, and sliding windows and other samples are not split."""
    sliding: int | None = None
    """Voxels along a side of sliding windows, for volumes that do not fit into memory. Windows are
    dealt out to the ranks; with --spatial, to groups of ranks that divide each window."""
    overlap: float | None = None
    """Overlap of neighboring windows, as a fraction; by default a quarter."""
    folds: tuple[Path, ...] = ()
    """Further runs with the same classes, such as the other folds of a cross-validation, whose
    scores are averaged."""
    probabilities: bool = False
    """Write the probability of each class as well, to OUTPUT with _probabilities in its name."""
    truth: Path | None = None
    """True labels, a file, or a folder with files of the same names: prints the Dice of classes."""
    split: str = "val"
    """Split of a data set."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Whether a volume or sample that can't be predicted, as it is damaged or has another shape,
    ends the command, or is named and left out; then the command ends with 65."""
    trust: tyro.conf.OmitArgPrefixes[FileTrust] = field(default_factory=FileTrust)
    """How far the files of a data set are trusted."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the network; "auto" is CUDA where each rank has a device of its own."""
    factory: str = ""
    """Factory of a network that is not pydist's own, such as nets.py:make, if you trust it."""
    task: str = ""
    """Task that is not pydist's own, such as mine.py:MyTask, if you trust it."""
