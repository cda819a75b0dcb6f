"""Defines the options of sets of medical volumes, converted and synthetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from pydist.errors import UsageError


@dataclass(frozen=True)
class GridOptions:
    """The grid that volumes are brought to.

    Attributes:
        cube: voxels along each side, whatever the volume's shape (as in the paper).
        spacing: approximate mm between voxels along depth, height and width: extents are integers
            and the volume keeps its size.
        multiple: pad each extent, at its far end, to a multiple of this.
    """

    cube: int | None = None
    spacing: tuple[float, float, float] | None = None
    multiple: int = 8

    def __post_init__(self) -> None:
        if self.cube is not None and self.spacing is not None:
            raise UsageError("cube and spacing: choose one of the two")
        if self.cube is not None and self.cube < 1:
            raise UsageError(f"cube={self.cube}: at least 1 voxel")
        if self.spacing is not None and not all(0 < mm < inf for mm in self.spacing):
            raise UsageError(f"spacing={self.spacing}: lengths in mm > 0")
        if self.multiple < 1:
            raise UsageError(f"multiple={self.multiple}: at least 1")


@dataclass(frozen=True)
class NiftiOptions:
    """Options that say how a data set is made of NIfTI files.

    Volumes are reoriented to RAS: width towards the patient's right, height to the front, depth up.

    Attributes:
        labels: folder with the labels, if SOURCE has only images.
        grid: the grid that volumes are brought to; by default their own.
        validation: fraction of the cases that goes to the split "val", the last by name.
        dtype: "int16" (rounded to integers), "float32", or "auto": int16 if all images hold
            integers of its range.
        storage: "contiguous", or "chunked" with a checksum in each chunk.
        compression: "gzip" for chunked storage, or "none".
        on_bad_case: "stop" at the first case that can't be used, or "skip" and report it.
        ignore_label: label of unlabeled voxels, such as 255: it stays in the files, and is no
            class. By default that of a class "ignore" in nnU-Net's `dataset.json`.
        keep_header: keep the free text of the image's header, which may name a patient.
        overwrite: replace a data set made from other files or with other options.
    """

    labels: Path | None = None
    grid: GridOptions = field(default_factory=GridOptions)
    validation: float = 0.2
    dtype: Literal["auto", "int16", "float32"] = "auto"
    storage: Literal["contiguous", "chunked"] = "contiguous"
    compression: Literal["none", "gzip"] = "none"
    on_bad_case: Literal["stop", "skip"] = "stop"
    ignore_label: int | None = None
    keep_header: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation={self.validation}: a fraction in [0, 1)")
        if self.ignore_label is not None and self.ignore_label < 1:
            raise UsageError(f"ignore_label={self.ignore_label}: 1 or more; 0 is background")
        if self.compression == "gzip" and self.storage == "contiguous":
            raise UsageError('compression="gzip" needs storage="chunked"')

    def recipe(self) -> dict[str, Any]:
        """Returns the options that determine the content of a volume's file."""
        names = ("dtype", "storage", "compression", "keep_header", "ignore_label")
        return {"grid": asdict(self.grid), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class CTOptions:
    """Options that determine a set of synthetic CT volumes.

    Attributes:
        count: volumes to make.
        shape: voxels along depth, height and width.
        spacing: mm between voxels along depth, height and width.
        seed: volume i depends only on (seed, i), `shape` and `noise`; its anatomy only on
            (seed, i).
        noise: standard deviation, 0 to 10000 Hounsfield units.
        validation: fraction of the volumes that goes to the split "val", the last ones.
        format: "hdf5" is read by blocks, for training; "nifti" writes the folders of nnU-Net;
            "both" also writes those, into FOLDER/nifti.
        storage: "contiguous", or "chunked" with a checksum in each chunk.
        compression: "gzip" for chunked storage, or "none".
        overwrite: replace a data set that was made with other options.
    """

    count: int = 8
    shape: tuple[int, int, int] = (64, 64, 64)
    spacing: tuple[float, float, float] = (4.0, 4.0, 4.0)
    seed: int = 0
    noise: float = 20.0
    validation: float = 0.25
    format: Literal["hdf5", "nifti", "both"] = "hdf5"
    storage: Literal["contiguous", "chunked"] = "contiguous"
    compression: Literal["none", "gzip"] = "none"
    overwrite: bool = False

    def __post_init__(self) -> None:
        lengths = all(0 < mm < inf for mm in self.spacing)
        faults = [
            (self.count < 1, f"count={self.count}: at least 1 volume"),
            (self.seed < 0, f"seed={self.seed}: 0 or more"),
            (min(self.shape) < 8, f"shape={self.shape}: at least 8 voxels along each side"),
            (not lengths, f"spacing={self.spacing}: lengths in mm > 0"),
            (not 0 <= self.noise <= 1e4, f"noise={self.noise}: 0 to 10000 Hounsfield units"),
            (not 0 <= self.validation < 1, f"validation={self.validation}: a fraction in [0, 1)"),
            (
                self.compression == "gzip" and self.storage == "contiguous",
                'compression="gzip" needs storage="chunked"',
            ),
        ]
        for wrong, message in faults:
            if wrong:
                raise UsageError(message)

    def recipe(self) -> dict[str, Any]:
        """Returns the options that determine the content of a volume's files."""
        chosen = asdict(self)
        for name in ("count", "validation", "format", "overwrite"):
            del chosen[name]
        return chosen
