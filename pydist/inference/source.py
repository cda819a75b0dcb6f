"""Reads images from files or memory into boxes over the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pydist.comm import Transport
from pydist.comm.consensus import together
from pydist.data.medical.case import read_part, require_alike
from pydist.data.medical.collection import as_stored
from pydist.data.medical.grid import GridOptions, VoxelGrid
from pydist.errors import DataError
from pydist.inference.distributed import BoxedVolume
from pydist.interop import ArrayLike, as_tensor
from pydist.partition import Box

_ADVICE = ", as which training data were stored"
_SLAB = 1 << 22
"""Voxels that are read or written at a time."""


class ImageSource(Protocol):
    """Image that the first rank of a group reads.

    Attributes:
        name: names the image in errors.
        channels: number of channels of each file.
        inner: extents on the network's grid, without padding.
        extents: extents of the results, in the orientation of the grid.
        slabs: boxes of the results, in the order in which they are stored.
    """

    name: str
    channels: Sequence[int]
    inner: Sequence[int]
    extents: Sequence[int]
    slabs: Sequence[Box]

    def read(self, file: int, box: Box) -> npt.NDArray[Any]:
        """Returns a file's channels in a box of the grid, [channels, ...]; padded at far ends."""
        ...

    def forget(self) -> None:
        """Releases the voxels after the last read."""
        ...


class ArrayImage:
    """Image that is an array of NumPy, torch, CuPy or the like, [C, ...]; see `ImageSource`.

    Raises:
        UsageError: it is not an array.
        DataError: it has complex values, or no dense memory.
    """

    def __init__(self, image: ArrayLike, name: str) -> None:
        tensor = as_tensor(image)
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
            kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
            raise DataError(
                f"{name}: a tensor of kind {kind}; real numbers in dense memory are needed"
            )
        # NumPy has no bfloat16.
        tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        self._values = tensor.numpy(force=True)
        self.name = name
        self.channels: Sequence[int] = self._values.shape[:1]
        self.inner: Sequence[int] = self._values.shape[1:]
        self.extents: Sequence[int] = self.inner
        self.slabs: Sequence[Box] = [Box([0] * len(self.inner), self.inner)]

    def read(self, file: int, box: Box) -> npt.NDArray[Any]:
        """Returns the channels in a box; see `ImageSource`."""
        del file
        inner = [
            range(min(a, n - 1), min(b, n))
            for a, b, n in zip(box.lo, box.hi, self.inner, strict=True)
        ]
        place = (slice(None), *(slice(r.start, r.stop) for r in inner))
        part = self._values[place]
        missing = [(0, n - len(r)) for n, r in zip(box.shape, inner, strict=True)]
        return np.pad(part, [(0, 0), *missing], mode="edge")

    def forget(self) -> None:
        """Releases the voxels; see `ImageSource`."""
        self._values = self._values[:, :0]


class NiftiImage:
    """Image that is stored in NIfTI files, one for each channel or one for all; see `ImageSource`.

    One file is in memory at a time, as it is stored.

    Args:
        paths: the files.
        options: the network's grid.

    Raises:
        DataError: a file is damaged, or the files do not match.
        UsageError: nibabel is missing.
    """

    def __init__(self, paths: Sequence[Path], options: GridOptions) -> None:
        self._paths, self._file = tuple(paths), 0
        self._image = self._first = read_part(self._paths[0])
        self.name = str(paths[0])
        self.block = self._first.block
        """The header of the first file."""
        self.grid = VoxelGrid(self.block, options, self.name)
        first = self._first.stored.shape[3] if self._first.stored.ndim == 4 else 1
        self.channels: Sequence[int] = [first, *[1] * (len(paths) - 1)]
        self.inner: Sequence[int] = self.grid.resampled
        self.extents: Sequence[int] = self.grid.oriented
        self.slabs: Sequence[Box] = self.grid.slabs(_SLAB)

    def read(self, file: int, box: Box) -> npt.NDArray[Any]:
        """Returns a file's channels in a box; see `ImageSource`."""
        if file != self._file:
            self.forget()
            self._image, self._file = read_part(self._paths[file]), file
            require_alike(self._first, self._image)
        return self.grid.image_part(self._image.values, box)

    def forget(self) -> None:
        """Releases the voxels; header and grid stay."""
        stored = self._first.stored
        nothing = np.broadcast_to(np.zeros((), stored.dtype), stored.shape)  # without memory
        self._image = self._first = replace(self._first, stored=nothing)


class ImageFacts:
    """What all ranks know of an image; the attributes are those of `ImageSource`."""

    def __init__(self, source: ImageSource | None, group: Transport) -> None:
        text = b""
        if source is not None:
            slabs = [(box.lo, box.hi) for box in source.slabs]
            known = [source.name, source.channels, source.inner, source.extents, slabs]
            text = json.dumps([*known]).encode()
        found = json.loads(group.broadcast_bytes(text))
        self.name, self.channels, self.inner, self.extents, slabs = found
        self.slabs = [Box(lo, hi) for lo, hi in slabs]


def distribute(
    source: ImageSource | None,
    facts: ImageFacts,
    group: Transport,
    boxes: Sequence[Box],
    dtype: str,
) -> tuple[BoxedVolume, float]:
    """Reads an image on the first rank, slab by slab, into boxes over the ranks. Collective.

    Args:
        source: the image, on the first rank.
        facts: of the image.
        group: the ranks.
        boxes: their boxes of the grid.
        dtype: as which training data were stored: values are rounded to it.

    Returns:
        The image, and the mean of its values.

    Raises:
        DataError: a file is damaged, or a value is not finite or does not fit the type.
    """
    image = BoxedVolume.empty(group, boxes, sum(facts.channels), getattr(torch, dtype))
    ends = [max(box.hi[dim] for box in boxes) for dim in range(len(boxes[0].hi))]
    nothing = Box([0] * len(ends), [0] * len(ends))
    sums: list[float] = []
    first = 0
    for file, channels in enumerate(facts.channels):
        for slab in _slabs(ends):
            values = np.empty((channels, *nothing.shape), dtype)
            with together(group, "reading an image"):
                if source is not None:
                    values = as_stored(source.read(file, slab), dtype, facts.name, _ADVICE)
                    sums += _sums(values, facts.name)
            held = [slab, *[nothing] * (group.size - 1)]
            given = BoxedVolume(group, held, torch.from_numpy(np.ascontiguousarray(values)))
            part = given.read([box.intersect(slab) for box in boxes])
            place = image.box.intersect(slab).shift([-a for a in image.box.lo])
            if part is not None and not place.empty:
                inside = tuple(slice(a, b) for a, b in zip(place.lo, place.hi, strict=True))
                for channel, read in enumerate(part, start=first):
                    image.local[channel][inside] = read
        first += channels
    mean = math.fsum(sums) / math.prod((sum(facts.channels), *ends))
    return image, float(json.loads(group.broadcast_bytes(json.dumps(mean).encode())))


def _slabs(extents: Sequence[int]) -> Iterator[Box]:
    """Yields slabs along the first dim, which do not depend on the number of ranks."""
    planes = max(1, _SLAB // math.prod(extents[1:]))
    for first in range(0, extents[0], planes):
        last = min(first + planes, extents[0])
        yield Box([first, *[0] * (len(extents) - 1)], [last, *extents[1:]])


def _sums(values: npt.NDArray[Any], name: str) -> list[float]:
    """Returns the sum of each plane."""
    sums = values.reshape(*values.shape[:2], -1).sum(2, dtype=np.float64).ravel().tolist()
    if not all(map(math.isfinite, sums)):
        raise DataError(f"{name}: a value is NaN or infinite")
    return sums
