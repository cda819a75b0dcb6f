"""Defines the options of a set of synthetic universes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydist.errors import UsageError

TransferName = Literal["no-wiggle", "full", "bbks"]
Assignment = Literal["ngp", "cic"]

TARGET_NAMES = ("Omega_m", "sigma_8", "N_spec", "H_0")

OMEGA_B = 0.049
"""Baryon density of all universes."""

PARAMETER_BOXES: dict[str, tuple[tuple[float, float], ...]] = {
    "wide": ((0.30, 0.10), (0.80, 0.20), (0.96, 0.06), (70.0, 14.0)),
    "narrow": ((0.30, 0.05), (0.865, 0.085), (0.95, 0.05), (70.0, 10.0)),
}
"""Center and half width of the targets' ranges, in the order of `TARGET_NAMES`.

"wide" is this project's own choice: no published source was found for the ranges of the public
4-parameter set. "narrow" is the box of the first CosmoFlow runs (2018), recovered from the means
and standard deviations in the code of NERSC/CosmoFlow.
"""


@dataclass(frozen=True)
class UniverseOptions:
    """Options that determine a set of synthetic universes for CosmoFlow.

    Each universe is one periodic box, evolved by second-order Lagrangian perturbation theory from
    one Gaussian field and observed at several redshifts (the channels). It is cut into samples. Cut
    a big box rather than making small ones: waves longer than a sample, and its mean density, carry
    information that a small periodic box does not have.

    Attributes:
        count: universes (boxes) to make.
        width: voxels along a side of a sample.
        box_width: voxels along a side of a box, a multiple of `width`; by default twice that. Each
            box gives (box_width / width)^3 samples, all with the box's parameters.
        cell: side of a voxel, 0.001 to 1000 Mpc/h (the public set has 1).
        seed: universe i depends only on (seed, i), whatever the other options' order or `workers`.
        validation: fraction of the universes that goes to the split "val"; no universe is in both.
        layout: "channel-first" writes one file per sample, `full` [C, W, W, W]: a depth block is
            one contiguous run per channel; the default, for training. "cosmoflow" is the layout of
            the public data: one file per universe, `full` (B, B, B, C), channel last.
        dtype: "int16", as the public data, or "float32", as LBANN's conversion.
        storage: "contiguous", or "chunked" with a checksum (fletcher32) in each chunk.
        compression: "gzip" for chunked storage, or "none".
        parameters: the box of parameters, "wide" (this project's own choice) or "narrow".
        redshifts: the channels, each from 0 to 1000.
        transfer: transfer function: "no-wiggle" or "full" (Eisenstein & Hu), or "bbks".
        assignment: "ngp" counts particles; "cic" is smoother and needs float32.
        device: "gpu" (CuPy), "cpu", or "auto": a GPU where CuPy finds one.
        workers: number of universes made at a time, in threads; memory grows with it.
        overwrite: replace a data set that was made with other options.
    """

    count: int = 8
    width: int = 32
    box_width: int | None = None
    cell: float = 2.0
    seed: int = 0
    validation: float = 0.25
    layout: Literal["channel-first", "cosmoflow"] = "channel-first"
    dtype: Literal["int16", "float32"] = "int16"
    storage: Literal["contiguous", "chunked"] = "contiguous"
    compression: Literal["none", "gzip"] = "none"
    parameters: Literal["wide", "narrow"] = "wide"
    redshifts: tuple[float, ...] = (0.0, 0.5, 1.5, 3.0)
    transfer: TransferName = "no-wiggle"
    assignment: Assignment = "ngp"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    workers: int = 1
    overwrite: bool = False

    def __post_init__(self) -> None:
        for wrong, message in self._faults():
            if wrong:
                raise UsageError(message)

    def _faults(self) -> list[tuple[bool, str]]:
        box = self.box
        return [
            (self.count < 1, f"count={self.count}: at least 1 universe"),
            (self.seed < 0, f"seed={self.seed}: 0 or more"),
            (self.width < 2, f"width={self.width}: at least 2 voxels"),
            (
                box < self.width or box % max(self.width, 1) != 0,
                f"box_width={box} is not a multiple of width={self.width}; possible are "
                f"{self.width}, {2 * self.width}, {3 * self.width}, ...",
            ),
            (not 1e-3 <= self.cell <= 1e3, f"cell={self.cell}: Mpc/h from 0.001 to 1000"),
            (not 0 <= self.validation < 1, f"validation={self.validation}: a fraction in [0, 1)"),
            (
                not self.redshifts or not all(0 <= z <= 1000 for z in self.redshifts),
                f"redshifts={self.redshifts}: at least one, each from 0 to 1000",
            ),
            (
                self.assignment == "cic" and self.dtype == "int16",
                'assignment="cic" gives fractions: choose dtype="float32"',
            ),
            (
                self.compression == "gzip" and self.storage == "contiguous",
                'compression="gzip" needs storage="chunked"',
            ),
            (self.workers < 1, f"workers={self.workers}: at least 1"),
        ]

    @property
    def box(self) -> int:
        """Number of voxels that a side of a box has."""
        return 2 * self.width if self.box_width is None else self.box_width

    @property
    def validation_count(self) -> int:
        """Universes in "val": the rounded fraction, with at least one per split if possible."""
        if self.validation == 0 or self.count == 1:
            return 0
        return min(max(round(self.count * self.validation), 1), self.count - 1)

    def recipe(self) -> dict[str, Any]:
        """Returns the options that determine the content of a universe's files."""
        chosen = asdict(self)
        for name in ("count", "validation", "device", "workers", "overwrite"):
            del chosen[name]
        chosen["box_width"] = self.box
        chosen["redshifts"] = list(self.redshifts)
        return chosen
