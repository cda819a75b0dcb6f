"""Defines the settings of augmentation, for configuration files and library users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydist.errors import UsageError
from pydist.grid import SPATIAL_AXES


@dataclass(frozen=True)
class AugmentOptions:
    """Table that configures random changes of training samples; by default there is none."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    crop: tuple[int, int, int] | None = None
    """Extents of a box of each sample, at a random place."""
    flip: tuple[str, ...] = ()
    """Dims that are each reversed in half of the samples: "depth", "height", "width"."""
    rotate: float = 0.0
    """Probability of a rotation by 90, 180 or 270 degrees in two random dims; of dims with unequal
    extents by 180 degrees."""
    probability: float = 0.2
    """Probability of each of the following changes of values, in this order."""
    noise: float = 0.0
    """Largest standard deviation of Gaussian noise."""
    blur: float = 0.0
    """Largest standard deviation of a Gaussian filter, in voxels."""
    scale: float = 0.0
    """Largest relative change of the values, such as 0.25 for factors of 0.75 to 1.25."""
    shift: float = 0.0
    """Largest number that is added to the values."""
    low_resolution: float = 1.0
    """Least factor by which the resolution is lowered, such as 0.5: nearest voxels, interpolated
    linearly."""
    gamma: float = 1.0
    """Largest exponent of the absolute values, which keep their signs; the least one is its
    inverse."""

    @property
    def changes(self) -> bool:
        """Whether there is any change."""
        nothing = AugmentOptions(probability=self.probability)
        return self != nothing

    def check(self, name: str = "") -> None:
        """Checks the values.

        Args:
            name: what comes before the names of the settings in errors.

        Raises:
            UsageError: one is impossible.
        """
        possible = {
            "crop": ("three counts >= 1", self.crop is None or min(self.crop) >= 1),
            "flip": (f"some of {', '.join(SPATIAL_AXES)}", {*self.flip} <= {*SPATIAL_AXES}),
            "rotate": ("0 to 1", 0 <= self.rotate <= 1),
            "probability": ("0 to 1", 0 <= self.probability <= 1),
            "noise": ("0 or more", 0 <= self.noise < float("inf")),
            "blur": ("0 to 16", 0 <= self.blur <= 16),
            "scale": ("0 or more, less than 1", 0 <= self.scale < 1),
            "shift": ("0 or more", 0 <= self.shift < float("inf")),
            "low_resolution": ("more than 0, up to 1", 0 < self.low_resolution <= 1),
            "gamma": ("1 to 10", 1 <= self.gamma <= 10),
        }
        for setting, (expected, fits) in possible.items():
            if not fits:
                given = getattr(self, setting)
                raise UsageError(f"{name}{setting} = {given}: possible are {expected}")
