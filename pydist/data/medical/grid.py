"""Maps volumes from a scanner's grid of voxels to a network's, and back.

A NIfTI file's voxels have axes of their own. Here they become [D, H, W] with width towards the
patient's right, height towards the front (anterior) and depth upwards (RAS, width first), then are
optionally resampled, and padded at the far ends to extents that a network can halve. Spacing and
orientation change only along the axes of the file: nothing is rotated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.medical.nifti_header import affine_of, header_of
from pydist.data.medical.options import GridOptions
from pydist.errors import DataError
from pydist.partition import Box

Extents = tuple[int, int, int]

_MOST_VOXELS = 1 << 33


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
        x, y, z = header.get_data_shape()[:3]
        self.file_shape: Extents = x, y, z
        towards = self._orientation[:, 0].astype(int)
        self._towards = towards.tolist()
        self.oriented: Extents = _backwards(self.file_shape, towards)
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
        whole = Box((0, 0, 0), self.padded)
        channels = [values] if values.ndim == 3 else np.moveaxis(values, 3, 0)
        return np.stack([self.image_part(channel.__getitem__, whole) for channel in channels])

    def image_part(
        self, read: Callable[[tuple[slice, ...]], npt.NDArray[Any]], box: Box
    ) -> npt.NDArray[Any]:
        """Brings the part of a channel that a box of the grid needs to the grid; see `image`.

        Args:
            read: returns the values at slices of the file's x, y and z.
            box: in the grid, [D, H, W], not empty.

        Returns:
            [D, H, W] of the box, the same bits as in the whole image.
        """
        ends = [n - 1 for n in self.resampled]
        lo = [min(a, end) for a, end in zip(box.lo, ends, strict=True)]
        hi = [min(b, end + 1) for b, end in zip(box.hi, ends, strict=True)]
        inner = Box(lo, hi)
        source = source_of(inner, self.oriented, self.resampled)
        values = self._oriented(read(self._in_file(source)))
        part = resized_part(values, source, self.oriented, self.resampled, inner)
        missing = [(0, n - m) for n, m in zip(box.shape, inner.shape, strict=True)]
        return np.pad(part, missing, mode="edge") if any(map(any, missing)) else part

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
        inner = label[tuple(slice(0, n) for n in self.resampled)]
        return self.in_file_order(nearest(inner, self.oriented))

    @property
    def last_axis(self) -> tuple[int, bool]:
        """The axis of [D, H, W] that is the file's last one, and whether it runs backwards."""
        return 2 - self._towards[2], bool(self._orientation[2, 1] < 0)

    def in_file_order(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Turns oriented voxels [D, H, W], all or those of a box, to the file's [x, y, z]."""
        from nibabel.orientations import apply_orientation, ornt_transform

        canonical = np.array([[0, 1], [1, 1], [2, 1]])
        back = ornt_transform(canonical, self._orientation)
        turned: npt.NDArray[Any] = apply_orientation(part.transpose(2, 1, 0), back)
        return turned

    def _in_file(self, box: Box) -> tuple[slice, ...]:
        """Returns the slices of the file's axes that hold a box of oriented voxels."""
        found = []
        for axis, world in enumerate(self._towards):
            lo, hi = box.lo[2 - world], box.hi[2 - world]
            found.append(slice(*self._flipped(axis, lo, hi)))
        return tuple(found)

    def _flipped(self, axis: int, lo: int, hi: int) -> tuple[int, int]:
        """Converts an interval of a file's axis from the file's order to the oriented, and back."""
        extent = self.file_shape[axis]
        return (lo, hi) if self._orientation[axis, 1] > 0 else (extent - hi, extent - lo)

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


def source_of(box: Box, extents: Sequence[int], shape: Sequence[int]) -> Box:
    """Returns the box of a volume that a box of the resized volume reads; see `resized_part`."""
    intervals = [
        (a, b) if n == extent or a >= b else _read(extent, n, a, b)
        for extent, n, a, b in zip(extents, shape, box.lo, box.hi, strict=True)
    ]
    return Box([a for a, _ in intervals], [b for _, b in intervals])


def resized_part(
    values: npt.NDArray[Any], source: Box, extents: Sequence[int], shape: Sequence[int], box: Box
) -> npt.NDArray[Any]:
    """Interpolates a box of a resized volume trilinearly, with the same bits as in the whole one.

    The outer faces of the volume keep their positions. Equals torch's
    `interpolate(mode="trilinear", align_corners=False)`, without smoothing before downsampling.

    Args:
        values: the volume's voxels in `source`, [D, H, W].
        source: `source_of` the box, or a box around it.
        extents: of the volume.
        shape: of the resized volume.
        box: of the resized volume.

    Returns:
        [D, H, W] of the box: float32, or the values as they are if nothing changes.
    """
    if tuple(shape) == tuple(extents):
        inner = box.shift([-a for a in source.lo])
        return values[inner.slices]
    found = values.astype(np.float32)
    for axis, (extent, n) in enumerate(zip(extents, shape, strict=True)):
        first, lo, hi = source.lo[axis], box.lo[axis], box.hi[axis]
        if n == extent:
            found = np.take(found, range(lo - first, hi - first), axis)
            continue
        below, above, share = _taps(extent, n, lo, hi)
        share = share.reshape([hi - lo if a == axis else 1 for a in range(3)])
        lower = np.take(found, below - first, axis)
        upper = np.take(found, above - first, axis)
        upper -= lower
        upper *= share
        upper += lower
        found = upper
    return found


def _taps(
    extent: int, n: int, lo: int, hi: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Returns the two voxels that outputs lo to hi - 1 of n lie between, and the second's share."""
    position = np.clip((np.arange(lo, hi) + 0.5) * (extent / n) - 0.5, 0, extent - 1)
    below = np.minimum(position.astype(np.intp), max(extent - 2, 0))
    above = np.minimum(below + 1, extent - 1)
    return below, above, (position - below).astype(np.float32)


def _read(extent: int, n: int, lo: int, hi: int) -> tuple[int, int]:
    below, above, _ = _taps(extent, n, lo, hi)
    return int(below[0]), int(above[-1]) + 1


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
