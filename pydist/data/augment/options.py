"""Defines the settings of augmentation, for configuration files and library users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar

from pydist.errors import UsageError
from pydist.grid import SPATIAL_AXES

PRESETS: dict[str, dict[str, Any]] = {
    "nnunet": {
        "angle": 30.0,
        "zoom": (1 / 1.4, 1 / 0.7),
        "noise": 0.1,
        "blur": (0.5, 1.0),
        "scale": 0.25,
        "contrast": 0.25,
        "low_resolution": 0.5,
        "inverted_gamma": (0.7, 1.5),
        "gamma": (0.7, 1.5),
        "flip": SPATIAL_AXES,
        "probabilities": {
            "angle": 0.2, "zoom": 0.2, "noise": 0.1, "blur": 0.2, "scale": 0.15, "contrast": 0.15,
            "low_resolution": 0.25, "inverted_gamma": 0.1, "gamma": 0.3,
        },
    },
}  # fmt: skip
"""Settings by name. "nnunet": the default of nnU-Net v2 (nnUNetTrainer with batchgeneratorsv2)."""

INJECTIVE = 0.4
"""Largest displacement of control points, over their spacing, that never folds space: 0.403 in
three dims (Choi and Lee 2000, Visual Computer 16, 353)."""

_UNCHANGED: dict[str, Any] = {
    "angle": 0, "zoom": (1, 1), "shear": 0, "translation": 0, "elastic": 0, "noise": 0,
    "blur": (0, 0), "scale": 0, "contrast": 0, "shift": 0, "low_resolution": 1,
    "inverted_gamma": (1, 1), "gamma": (1, 1),
}  # fmt: skip
"""The changes that have a probability, with the values at which they change nothing."""


@dataclass(frozen=True)
class AugmentOptions:
    """Table that configures random changes of training samples; by default there is none."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    crop: tuple[int, int, int] | None = None
    """Extents of a box of each sample, at a random place."""
    angle: float = 0.0
    """Largest rotation in each plane of two dims, in degrees."""
    zoom: tuple[float, float] = (1.0, 1.0)
    """Least and largest factor of the size of objects."""
    shear: float = 0.0
    """Largest shift along one dim per voxel along another one."""
    translation: float = 0.0
    """Largest shift along each dim, as a fraction of the extent."""
    elastic: float = 0.0
    """Largest displacement of an elastic deformation along each dim, in voxels."""
    elastic_spacing: float = 16.0
    """Voxels between the control points of an elastic deformation."""
    flip: tuple[str, ...] = ()
    """Dims that are each reversed in half of the samples: "depth", "height", "width"."""
    rotate: float = 0.0
    """Probability of a rotation by 90, 180 or 270 degrees in two random dims; of dims with unequal
    extents by 180 degrees."""
    probability: float = 0.2
    """Probability of each change but crop, flip and rotate."""
    probabilities: dict[str, float] = field(default_factory=dict)
    """Probabilities of changes that have others, such as {noise = 0.1, blur = 0.2}."""
    noise: float = 0.0
    """Largest standard deviation of Gaussian noise."""
    blur: tuple[float, float] = (0.0, 0.0)
    """Least and largest standard deviation of a Gaussian filter, in voxels."""
    scale: float = 0.0
    """Largest relative change of the values, such as 0.25 for factors of 0.75 to 1.25."""
    contrast: float = 0.0
    """Largest relative change of the distance to the middle of the values' range."""
    shift: float = 0.0
    """Largest number that is added to the values."""
    low_resolution: float = 1.0
    """Least factor by which the resolution is lowered, such as 0.5: nearest voxels, interpolated
    linearly."""
    inverted_gamma: tuple[float, float] = (1.0, 1.0)
    """Least and largest exponent of the distance to the upper end of the values' range."""
    gamma: tuple[float, float] = (1.0, 1.0)
    """Least and largest exponent of the distance to the lower end of the values' range."""

    def __post_init__(self) -> None:
        for setting in ("crop", "flip", *_UNCHANGED):
            if isinstance(given := getattr(self, setting), list):
                object.__setattr__(self, setting, tuple(given))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> AugmentOptions:
        """Returns the settings of a preset, some of them changed.

        Args:
            name: "nnunet" for nnU-Net's default.
            changes: other settings.

        Raises:
            UsageError: no such preset.
        """
        return cls(**with_preset({"preset": name, **changes}))

    @property
    def changes(self) -> bool:
        """Whether there is any change."""
        return (
            self.crop is not None
            or bool(self.flip)
            or self.rotate > 0
            or any(self.likelihood(name) > 0 for name in _UNCHANGED)
        )

    def cropped(self, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Returns the shape (C, D, H, W) that a sample has after the changes."""
        return shape if self.crop is None else (shape[0], *self.crop)

    def likelihood(self, name: str) -> float:
        """Returns the probability of a change; 0 if its setting changes nothing."""
        if getattr(self, name) == _UNCHANGED[name]:
            return 0.0
        return self.probabilities.get(name, self.probability)

    def check(self, name: str = "") -> None:
        """Checks the values.

        Args:
            name: what comes before the names of the settings in errors.

        Raises:
            UsageError: one is impossible.
        """
        infinite = float("inf")
        bounds = {
            "rotate": (0, 1), "probability": (0, 1), "angle": (0, 180), "shear": (0, 1),
            "translation": (0, 1), "elastic_spacing": (2, 1e6), "zoom": (0.1, 10), "blur": (0, 16),
            "inverted_gamma": (0.1, 10), "gamma": (0.1, 10),
        }  # fmt: skip
        possible = {
            "crop": ("three counts >= 1", self.crop is None or _are_three_counts(self.crop)),
            "flip": (f"some of {', '.join(SPATIAL_AXES)}", {*self.flip} <= {*SPATIAL_AXES}),
            "elastic": (
                f"0 to 0.4 of elastic_spacing, {INJECTIVE * self.elastic_spacing:g}; more would "
                "fold the sample",
                0 <= self.elastic <= INJECTIVE * self.elastic_spacing,
            ),
            "noise": ("0 or more", 0 <= self.noise < infinite),
            "scale": ("0 or more, less than 1", 0 <= self.scale < 1),
            "contrast": ("0 or more, less than 1", 0 <= self.contrast < 1),
            "shift": ("0 or more", 0 <= self.shift < infinite),
            "low_resolution": ("more than 0, up to 1", 0 < self.low_resolution <= 1),
            "probabilities": (
                f"0 to 1 for some of {', '.join(_UNCHANGED)}",
                self.probabilities.keys() <= _UNCHANGED.keys()
                and all(0 <= each <= 1 for each in self.probabilities.values()),
            ),
        }
        for setting, (low, high) in bounds.items():
            given = getattr(self, setting)
            are_several = isinstance(given, tuple)
            if isinstance(_UNCHANGED.get(setting), tuple):
                is_pair = are_several and len(given) == 2
                fits = is_pair and low <= given[0] <= given[1] <= high
                possible[setting] = (f"[least, largest] from {low} to {high}", fits)
            else:
                fits = not are_several and low <= given <= high
                possible[setting] = (f"{low} to {high:g}", fits)
        for setting, (expected, fits) in possible.items():
            if not fits:
                given = getattr(self, setting)
                given = list(given) if isinstance(given, tuple) else given
                raise UsageError(f"{name}{setting} = {given}: possible are {expected}")


def _are_three_counts(given: Any) -> bool:
    are_three = isinstance(given, tuple) and len(given) == 3
    return are_three and all(isinstance(n, Integral) and int(n) >= 1 for n in given)


def with_preset(table: Any) -> Any:
    """Completes a table that names a preset, or a preset's name alone, by the preset's settings.

    Raises:
        UsageError: no such preset.
    """
    table = {"preset": table} if isinstance(table, str) else table
    if not isinstance(table, Mapping) or "preset" not in table:
        return table
    name = table["preset"]
    if not isinstance(name, str) or name not in PRESETS:
        raise UsageError(f"preset = {name!r}: possible are {', '.join(PRESETS)}")
    given = {key: value for key, value in table.items() if key != "preset"}
    merged = {**PRESETS[name], **given}
    own = given.get("probabilities")
    if isinstance(own, Mapping):
        merged["probabilities"] = {**PRESETS[name]["probabilities"], **own}
    return merged
