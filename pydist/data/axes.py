"""The order of axes in files, and samples of fewer dims: images and lines are flat volumes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Axes = Literal["CDHW", "DHWC", "CHW", "HWC", "CW", "WC"]
"""Order of the axes of an array of samples: volumes, images (without depth) or lines (width
alone), channel first or last."""

_ORDER = "CDHW"
_T = TypeVar("_T")


def spatial_dims(axes: Axes) -> int:
    """Returns the number of spatial dims of samples, as networks get them."""
    return len(axes) - 1


def channels_last(axes: Axes) -> bool:
    """Returns whether the channel is the last axis."""
    return axes.endswith("C")


def without_flat(shape: Sequence[int], dims: int) -> tuple[int, ...]:
    """Returns the shape (C, D, H, W) of a sample as networks get it, such as (C, H, W)."""
    return (shape[0], *shape[len(shape) - dims :])


def file_order(axes: Axes, of_volume: Sequence[_T]) -> tuple[_T, ...]:
    """Returns values given for C, D, H and W, such as extents, for the axes of the array."""
    return tuple(of_volume[_ORDER.index(axis)] for axis in axes)


def label_file_order(axes: Axes, of_volume: Sequence[_T]) -> tuple[_T, ...]:
    """Returns values given for D, H and W for the axes of an array of labels."""
    return tuple(of_volume[len(of_volume) - spatial_dims(axes) :])


def as_volume(axes: Axes, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a part of an array of samples as [C, D, H, W], a view."""
    found = np.moveaxis(stored, -1, 0) if channels_last(axes) else stored
    place: tuple[slice | None, ...] = (slice(None), *[None] * (len(_ORDER) - found.ndim))
    return found[place]
