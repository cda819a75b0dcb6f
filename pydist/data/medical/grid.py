"""Maps volumes from a scanner's grid of voxels to a network's, and back.

A NIfTI file's voxels have axes of their own. Here they become [D, H, W] with width towards the
patient's right, height towards the front (anterior) and depth upwards (RAS, width first), then are
optionally resampled, and padded at the far ends to extents that a network can halve. Spacing and
orientation change only along the axes of the file: nothing is rotated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.medical.nifti import affine_of, header_of
from pydist.errors import DataError, UsageError

Extents = tuple[int, int, int]

_MOST_VOXELS = 1 << 33


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
        if self.spacing is not None and not all(0 < mm < math.inf for mm in self.spacing):
            raise UsageError(f"spacing={self.spacing}: lengths in mm > 0")
        if self.multiple < 1:
            raise UsageError(f"multiple={self.multiple}: at least 1")


class VoxelGrid:
    """Map that resamples one file's voxels to a network's grid, and labels back to the file's.

    Args:
        block: the file's NIfTI header, as bytes.
        options: the network's grid.
        where: names the file in errors.

    Raises:
        DataError: the header's affine can't be inverted, or the new grid is far too large.
    """

    def __init__(self, block: bytes, options: GridOptions, where: str) -> None:
        from nibabel.affines import voxel_sizes
        from nibabel.orientations import io_orientation

        header = header_of(block, where)
        affine = affine_of(header, where)
        self.block = block
        self.options = options
        self._orientation = io_orientation(affine)
        if np.isnan(self._orientation).any():
            raise DataError(f"{where}: its affine {affine[:3, :3].tolist()} is not invertible")
        shape = header.get_data_shape()[:3]
        towards = self._orientation[:, 0].astype(int)
        self.oriented: Extents = _backwards(shape, towards)
        """(D, H, W) after orientation."""
        self.spacing = _backwards(voxel_sizes(affine), towards)
        """mm between voxels along depth, height and width, before resampling."""
        self.resampled: Extents = self._target()
        """(D, H, W) after resampling."""
        multiple = options.multiple
        depth, height, width = (-(-n // multiple) * multiple for n in self.resampled)
        self.padded: Extents = depth, height, width
        """(D, H, W) of the network's input."""
        if math.prod(self.padded) > _MOST_VOXELS:
            raise DataError(f"{where}: would get {self.padded} voxels; {_MOST_VOXELS} are possible")

    def image(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Brings an image to the grid: trilinear, padded with its border values.

        Args:
            values: [x, y, z] or [x, y, z, channel], in the file's layout.

        Returns:
            [C, D, H, W]; float32 if it was resampled.
        """
        channels = [values] if values.ndim == 3 else np.moveaxis(values, 3, 0)
        found = [resized(self._oriented(channel), self.resampled) for channel in channels]
        return np.stack([np.pad(channel, self._padding(), mode="edge") for channel in found])

    def label(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Brings labels to the grid: the nearest voxel's, 0 in the padding.

        Args:
            values: [x, y, z], in the file's layout.

        Returns:
            [D, H, W], of the same type.
        """
        found = nearest(self._oriented(values), self.resampled)
        return np.pad(found, self._padding())

    def label_back(self, label: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Brings labels from the network's grid to the file's: the nearest voxel's.

        Args:
            label: [D, H, W].

        Returns:
            [x, y, z].
        """
        from nibabel.orientations import apply_orientation, ornt_transform

        inner = label[tuple(slice(0, n) for n in self.resampled)]
        canonical = np.array([[0, 1], [1, 1], [2, 1]])
        back = ornt_transform(canonical, self._orientation)
        return apply_orientation(nearest(inner, self.oriented).transpose(2, 1, 0), back)

    def _oriented(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        from nibabel.orientations import apply_orientation

        oriented: npt.NDArray[Any] = apply_orientation(values, self._orientation)
        return oriented.transpose(2, 1, 0)

    def _padding(self) -> list[tuple[int, int]]:
        return [(0, p - n) for n, p in zip(self.resampled, self.padded, strict=True)]

    def _target(self) -> Extents:
        if self.options.cube is not None:
            return (self.options.cube,) * 3
        if self.options.spacing is None:
            return self.oriented
        lengths = zip(self.oriented, self.spacing, self.options.spacing, strict=True)
        depth, height, width = (max(1, round(n * old / new)) for n, old, new in lengths)
        return depth, height, width


def resized(values: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Interpolates [D, H, W] trilinearly; the outer faces of the volume keep their positions.

    Equals torch's `interpolate(mode="trilinear", align_corners=False)`, without smoothing before
    downsampling.
    """
    if tuple(shape) == values.shape:
        return values
    found = values.astype(np.float32)
    for axis, n in enumerate(shape):
        extent = found.shape[axis]
        if n == extent:
            continue
        position = np.clip((np.arange(n) + 0.5) * (extent / n) - 0.5, 0, extent - 1)
        below = np.minimum(position.astype(np.intp), max(extent - 2, 0))
        above = np.minimum(below + 1, extent - 1)
        share = (position - below).astype(np.float32)
        share = share.reshape([n if a == axis else 1 for a in range(3)])
        lower = np.take(found, below, axis)
        upper = np.take(found, above, axis)
        upper -= lower
        upper *= share
        upper += lower
        found = upper
    return found


def nearest(values: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Resamples [D, H, W] by the nearest voxel, on a grid with the same outer faces."""
    if tuple(shape) == values.shape:
        return values
    indices = [
        ((2 * np.arange(n) + 1) * extent) // (2 * n)
        for n, extent in zip(shape, values.shape, strict=True)
    ]
    return values[np.ix_(*indices)]


def _backwards(by_file_axis: Sequence[Any], towards: npt.NDArray[np.intp]) -> tuple[Any, Any, Any]:
    """Reorders values by a file's axes as (depth, height, width)."""
    by_world = dict(zip(towards.tolist(), by_file_axis, strict=True))
    return by_world[2], by_world[1], by_world[0]
