"""Makes synthetic CT volumes for segmentation: a liver with tumors.

They replace LiTS where that is not available: same classes, same numbers of tumors, plausible
Hounsfield units. The liver is an ellipsoid whose boundary is moved by a smooth Gaussian field;
tumors are balls inside it. Real anatomy is far richer: a good score here shows that training
works, no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.medical.options import CTOptions

CLASS_NAMES = ("background", "liver", "tumor")
LEVELS = (-100.0, 110.0, 60.0)
"""Hounsfield units of the classes."""

MOST_TUMORS = 10

Floats = npt.NDArray[np.floating[Any]]

# Lengths are fractions of half the volume's extent: a seed means the same anatomy on every grid.
_CENTER = 0.12
_SEMI_AXES = (0.45, 0.7)
_ROUGHNESS = 0.16
_PERIOD = 2.6
_HIGHEST_MODE = 3
_TUMOR_RADIUS = (0.08, 0.18)
_TUMOR_DEPTH = 0.8


def make_volume(
    options: CTOptions, index: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.uint8]]:
    """Makes one volume.

    NumPy may change how it makes normal numbers of a generator's bits; then the same seed gives
    another volume.

    Returns:
        The image in Hounsfield units, [D, H, W], and the label of each voxel, [D, H, W]: the
        position of its class in `CLASS_NAMES`.
    """
    anatomy, noise = (
        np.random.Generator(np.random.Philox(np.random.SeedSequence([options.seed, index, stream])))
        for stream in (0, 1)
    )
    label = _label(anatomy, options.shape)
    image = np.take(np.array(LEVELS, dtype=np.float32), label)
    for axis in range(3):
        _smooth(image, axis)  # the scanner's point spread
    if options.noise:
        grain = noise.standard_normal(options.shape, dtype=np.float32)
        for axis in (1, 2):
            _smooth(grain, axis)
        grain *= options.noise / 0.375  # std after smoothing by 1/4, 1/2, 1/4 along two axes
        image += grain
    return np.rint(image).astype(np.int16), label


def _label(draw: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    center = draw.uniform(-_CENTER, _CENTER, 3)
    axes = draw.uniform(*_SEMI_AXES, 3)
    rotation = np.linalg.qr(draw.standard_normal((3, 3)))[0]
    roughness = _smooth_field(draw, shape)
    grid = [((np.arange(n) + 0.5) * (2 / n) - 1).astype(np.float32) for n in shape]
    level = np.full(shape, -1, dtype=np.float32)
    for direction, length in zip(rotation, axes, strict=True):
        level += (_plane(grid, center, direction) / np.float32(length)) ** 2
    liver = level < np.float32(_ROUGHNESS) * roughness
    label = liver.astype(np.uint8)
    for _ in range(int(draw.integers(0, MOST_TUMORS + 1))):
        towards = draw.standard_normal(3)
        towards *= _TUMOR_DEPTH * draw.uniform() ** (1 / 3) / np.linalg.norm(towards)
        _add_ball(label, grid, center + (towards * axes) @ rotation, draw.uniform(*_TUMOR_RADIUS))
    return label


def _plane(grid: list[Floats], center: Floats, direction: Floats) -> Floats:
    """Computes the distance of each voxel from `center` along a direction."""
    parts = [
        (axis - np.float32(c)) * np.float32(d)
        for axis, c, d in zip(grid, center, direction, strict=True)
    ]
    return parts[0][:, None, None] + parts[1][:, None] + parts[2]


def _add_ball(
    label: npt.NDArray[np.uint8], grid: list[Floats], center: Floats, radius: float
) -> None:
    """Changes liver to tumor within a ball."""
    near = [np.flatnonzero(np.abs(axis - c) < radius) for axis, c in zip(grid, center, strict=True)]
    if not all(len(indices) for indices in near):
        return
    box = tuple(slice(indices[0], indices[-1] + 1) for indices in near)
    z, y, x = ((axis[cut] - c) ** 2 for axis, cut, c in zip(grid, box, center, strict=True))
    inside = z[:, None, None] + y[:, None] + x < radius**2
    part = label[box]
    part[inside & (part == 1)] = 2


def _smooth_field(draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draws a Gaussian random field of variance 1: a Fourier series of few terms, on any grid."""
    numbers = np.array([0, *(k for k in range(1, _HIGHEST_MODE + 1) for _ in range(2))])
    k2 = numbers[:, None, None] ** 2 + numbers[:, None] ** 2 + numbers**2
    amplitude = np.exp(-k2 / 6.0) * (k2 > 0)
    waves = []
    for n in shape:
        u = (np.arange(n) + 0.5) * (2 / n) - 1
        phase = 2 * np.pi / _PERIOD * u * numbers[:, None]
        # Each number occurs twice, for a cosine and a sine, both scaled to a mean square of 1.
        wave = np.where(np.arange(len(numbers))[:, None] % 2, np.cos(phase), np.sin(phase))
        wave *= np.sqrt(2)
        wave[0] = 1
        waves.append(wave.astype(np.float32))
    field = draw.standard_normal(amplitude.shape) * amplitude / np.sqrt((amplitude**2).sum())
    field = field.astype(np.float32)
    for wave in reversed(waves):
        field = np.moveaxis(np.tensordot(field, wave, axes=(2, 0)), -1, 0)
    return field


def _smooth(values: Floats, axis: int) -> None:
    """Smooths by 1/4, 1/2, 1/4 along an axis, in place; border values extend beyond the border."""
    lines = np.moveaxis(values, axis, 0)
    before, here = lines[0].copy(), np.empty_like(lines[0])
    for i in range(len(lines)):
        here[...] = lines[i]
        after = lines[min(i + 1, len(lines) - 1)]
        lines[i] = 0.25 * before + 0.5 * here + 0.25 * after
        before, here = here, before
