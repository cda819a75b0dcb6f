"""Reads images from files or memory into boxes over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pydist.comm import Transport
from pydist.comm.consensus import together
from pydist.data.medical.case import open_part, require_alike
from pydist.data.medical.collection import as_stored
from pydist.data.medical.grid import VoxelGrid
from pydist.data.medical.nifti import Nifti, OpenNifti
from pydist.data.medical.options import GridOptions
from pydist.errors import DataError
from pydist.inference.distributed import BoxedVolume
from pydist.inference.loaded import values_of
from pydist.interop import ArrayLike
from pydist.partition import Box

_ADVICE = ", as which training data were stored"
_SLAB = 1 << 19
"""Voxels that are read or written at a time."""


class ImageSource(Protocol):
    """Image that the first rank of a group reads.

    Attributes:
        name: names the image in errors.
        channels: number of channels.
        inner: extents on the network's grid, without padding.
        extents: extents of the results, in the orientation of the grid.
        axis: of the grid, along which planes are stored one after another.
        backwards: whether they are stored from the last to the first.
    """

    name: str
    channels: int
    inner: Sequence[int]
    extents: Sequence[int]
    axis: int
    backwards: bool

    def read(self, channel: int, box: Box) -> npt.NDArray[Any]:
        """Returns a channel in a box of the grid, padded at the far ends."""
        ...

    def close(self) -> None:
        """Releases the voxels after the last read."""
        ...


class ArrayImage:
    """Image that is an array of NumPy, torch, CuPy or the like, [C, ...]; see `ImageSource`.

    Raises:
        UsageError: it is not an array.
        DataError: it has complex values, or no dense memory.
    """

    def __init__(self, image: ArrayLike, name: str) -> None:
        self._values = values_of(image, name)
        self.name = name
        self.channels: int = self._values.shape[0]
        self.inner: Sequence[int] = self._values.shape[1:]
        self.extents: Sequence[int] = self.inner
        self.axis, self.backwards = 0, False

    def read(self, channel: int, box: Box) -> npt.NDArray[Any]:
        """Returns a channel in a box; see `ImageSource`."""
        inner = [
            range(min(a, n - 1), min(b, n))
            for a, b, n in zip(box.lo, box.hi, self.inner, strict=True)
        ]
        part = self._values[channel][tuple(slice(r.start, r.stop) for r in inner)]
        missing = [(0, n - len(r)) for n, r in zip(box.shape, inner, strict=True)]
        return np.pad(part, missing, mode="edge")

    def close(self) -> None:
        """Releases the voxels; see `ImageSource`."""
        self._values = self._values[:, :0]


class NiftiImage:
    """Image that is stored in NIfTI files, one for each channel or one for all; see `ImageSource`.

    Files are read plane by plane. A DICOM series in place of a file is in memory as a whole.

    Args:
        paths: the files.
        options: the network's grid.

    Raises:
        DataError: a file is damaged, or the files do not match.
        UsageError: nibabel is missing.
    """

    def __init__(self, paths: Sequence[Path], options: GridOptions) -> None:
        self._paths, self._file = tuple(paths), 0
        self._image: OpenNifti | Nifti | None
        self._first, self._image = open_part(self._paths[0])
        with ExitStack() as stack:
            stack.callback(self.close)
            self.name = str(paths[0])
            self.block = self._first.block
            """The header of the first file."""
            self.grid = VoxelGrid(self.block, options, self.name)
            stack.pop_all()
        self._in_first = math.prod(self._first.shape[3:])
        self.channels: int = self._in_first + len(paths) - 1
        self.inner: Sequence[int] = self.grid.resampled
        self.extents: Sequence[int] = self.grid.oriented
        self.axis, self.backwards = self.grid.last_axis

    def read(self, channel: int, box: Box) -> npt.NDArray[Any]:
        """Returns a channel in a box; see `ImageSource`."""
        file = max(0, channel - self._in_first + 1)
        if file != self._file:
            self.close()
            header, self._image = open_part(self._paths[file])
            self._file = file
            require_alike(self._first, header)
        assert self._image is not None
        read = partial(self._image.part, channel=channel if file == 0 else 0)
        return self.grid.image_part(read, box)

    def close(self) -> None:
        """Releases the voxels; header and grid stay."""
        if self._image is not None:
            self._image.close()
            self._image = None


class ImageFacts:
    """What all ranks know of an image; the attributes are those of `ImageSource`."""

    def __init__(self, source: ImageSource | None, group: Transport) -> None:
        known: list[object] = []
        if source is not None:
            known = [source.name, source.channels, source.inner, source.extents]
            known += [source.axis, source.backwards]
        found = group.broadcast_json(known)
        self.name, self.channels, self.inner, self.extents, self._axis, self._backwards = found

    def slabs(self, extents: Sequence[int]) -> list[Box]:
        """Divides a grid into slabs, in the order of the stored planes, for any number of ranks."""
        axis, planes = self._axis, extents[self._axis]
        step = max(1, _SLAB * planes // math.prod(extents))
        found = []
        for first in range(0, planes, step):
            lo, hi = [0] * len(extents), list(extents)
            lo[axis], hi[axis] = first, min(first + step, planes)
            found.append(Box(lo, hi))
        return found[::-1] if self._backwards else found


def distribute(
    source: ImageSource | None,
    facts: ImageFacts,
    group: Transport,
    boxes: Sequence[Box],
    extents: Sequence[int],
    dtype: str,
) -> tuple[BoxedVolume, float]:
    """Reads an image on the first rank, slab by slab, into boxes over the ranks. Collective.

    Args:
        source: the image, on the first rank.
        facts: of the image.
        group: the ranks.
        boxes: their boxes of the grid.
        extents: of the grid as in training, without what windows add at the far ends.
        dtype: as which training data were stored: values are rounded to it.

    Returns:
        The image, and the mean of its values within `extents`.

    Raises:
        DataError: a file is damaged, or a value is not finite or does not fit the type.
    """
    image = BoxedVolume.empty(group, boxes, facts.channels, getattr(torch, dtype))
    ends = [max(box.hi[dim] for box in boxes) for dim in range(len(boxes[0].hi))]
    nothing = Box([0] * len(ends), [0] * len(ends))
    counted = Box([0] * len(ends), extents)
    sums: list[float] = []
    for channel in range(facts.channels):
        for slab in facts.slabs(ends):
            values = np.empty(nothing.shape, dtype)
            with together(group, "reading an image"):
                if source is not None:
                    values = as_stored(source.read(channel, slab), dtype, facts.name, _ADVICE)
                    inside = counted.intersect(slab).shift([-a for a in slab.lo]).slices
                    sums.append(_sum(values[inside], facts.name))
            held = [slab, *[nothing] * (group.size - 1)]
            stored = torch.from_numpy(np.ascontiguousarray(values))[None]
            part = BoxedVolume(group, held, stored).read([box.intersect(slab) for box in boxes])
            del values, stored  # before the next ones are read
            place = image.box.intersect(slab).shift([-a for a in image.box.lo])
            if part is not None and not place.empty:
                inside = place.slices
                image.local[channel][inside] = part[0]
    mean = math.fsum(sums) / math.prod((facts.channels, *extents))
    return image, float(group.broadcast_json(mean))


def _sum(values: npt.NDArray[Any], name: str) -> float:
    total = float(values.sum(dtype=np.float64))
    if not math.isfinite(total):
        raise DataError(f"{name}: a value is NaN or infinite")
    return total
