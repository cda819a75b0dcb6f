"""Changes the samples of a source at random, by blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from pydist.data.augment.draws import SampleDraws
from pydist.data.augment.options import AugmentOptions
from pydist.data.augment.steps import (
    Array,
    Change,
    Crop,
    Noise,
    Range,
    Triple,
    Turn,
    Values,
    blur,
    boxes_of,
    curved,
    low_resolution,
    stretched,
)
from pydist.data.augment.warp import Elastic, Warp, rotation
from pydist.data.blocks import BlockSource, SourceOver, in_epoch, take_into
from pydist.errors import UsageError
from pydist.grid import SPATIAL_AXES
from pydist.interop import ArrayLike
from pydist.partition import Box


class Augmented(SourceOver):
    """`BlockSource` that changes the samples of another one at random, differently in each epoch.

    What is drawn depends on seed, epoch and sample, and noise also on the voxel: so each split of a
    sample over ranks has blocks of the same augmented sample. A rank reads the box that its block
    depends on. Targets that are no labels stay as they are. Contrast and gamma refer to the range
    of the data set's values (`value_range`), not to the sample's own, which no block shows; without
    one, to 0 and to the absolute values.

    Args:
        dataset: the samples, normalized.
        options: the changes.
        seed: of the random numbers.

    Attributes:
        epoch: the epoch, from 0 on; see `in_epoch`.

    Raises:
        UsageError: an option is impossible, or a sample is smaller than the crop.
    """

    def __init__(self, dataset: BlockSource, options: AugmentOptions, seed: int = 0) -> None:
        options.check()
        super().__init__(dataset)
        self.options, self.seed, self.epoch = options, seed, 0
        self._range: Range | None = None
        known = getattr(dataset, "value_range", None)
        if known is not None:
            lower, upper = (np.reshape(each, (-1, 1, 1, 1)) for each in known)
            self._range = lower, upper
        crop = options.crop
        for shape in {dataset.shape_of(index) for index in range(len(dataset))}:
            if crop is not None and any(n < m for n, m in zip(shape[1:], crop, strict=True)):
                raise UsageError(
                    f"crop = {list(crop)}: a sample has {' × '.join(map(str, shape[1:]))} voxels"
                )

    def in_epoch(self, epoch: int) -> Augmented:
        """Returns the samples as they are in an epoch."""
        found = self.over(in_epoch(self.dataset, epoch))
        found.epoch = epoch
        return found

    def over(self, dataset: BlockSource) -> Augmented:
        """Returns the same changes of the same samples from another source."""
        found = copy(self)
        found.dataset = dataset
        return found

    def source_box(self, index: int, box: Box) -> Box:
        """Returns the box of the unchanged sample that a box of the changed one depends on.

        Both are in the samples' indices (D, H, W).
        """
        return boxes_of(list(self._changes(index)), box)[0]

    @property
    def sample_shape(self) -> tuple[int, int, int, int]:
        """Shape (C, D, H, W) that a sample has; see `BlockSource.sample_shape`."""
        return self.options.cropped(self.dataset.sample_shape)

    @property
    def identity(self) -> str:
        """Text that identifies samples and changes; see `BlockSource.identity`."""
        return f"{self.dataset.identity} {self.options} {self.seed}"

    @property
    def bytes_read(self) -> int:
        """Bytes that have been read from files, if the samples count them."""
        return int(getattr(self.dataset, "bytes_read", 0))

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        """Returns the shape (C, D, H, W) of sample `index`; see `BlockSource.shape_of`."""
        return self.options.cropped(self.dataset.shape_of(index))

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Returns a block of an augmented sample; see `BlockSource.read_block`."""
        shape = self.shape_of(index)
        whole = Box((0, 0, 0, 0), shape) if box is None else box
        changes, wanted = list(self._changes(index)), Box(whole.lo[1:], whole.hi[1:])
        room = torch.empty(whole.shape, dtype=self.dtype) if out is None else out
        if not wanted.empty:
            boxes = boxes_of(changes, wanted)
            source = Box((0, *boxes[0].lo), (shape[0], *boxes[0].hi))
            # Of that type, in which changes compute: the source may return any array.
            values = torch.empty(source.shape, dtype=self.dtype)
            take_into(self.dataset.read_block(index, source, values), values)
            found = _changed(values.numpy(), changes, boxes)
            np.copyto(room.numpy(), found[whole.lo[0] : whole.hi[0]])
        return room

    def read_labels(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Returns the labels of a block, moved as it is; see `BlockSource.read_labels`."""
        wanted = Box((0, 0, 0), self.shape_of(index)[1:]) if box is None else box
        room = torch.empty(wanted.shape, dtype=torch.int64) if out is None else out
        if not wanted.empty:
            changes = [change for change in self._changes(index) if change.moves]
            boxes = boxes_of(changes, wanted)
            labels = torch.empty(boxes[0].shape, dtype=torch.int64)
            take_into(self.dataset.read_labels(index, boxes[0], labels), labels)
            np.copyto(room.numpy(), _changed(labels.numpy()[None], changes, boxes)[0])
        return room

    def target(self, index: int) -> ArrayLike:
        """Returns the values to predict; see `BlockSource.target`."""
        return self.dataset.target(index)

    def _changes(self, index: int) -> Iterator[Change]:
        """Draws the changes of a sample, in their order."""
        draws, options = SampleDraws(self.seed, self.epoch, index), self.options
        before, size = _triple(self.dataset.shape_of(index)[1:]), _triple(self.shape_of(index)[1:])
        room = [n - m + 1 for n, m in zip(before, size, strict=True)]
        first = _triple([draws.below(f"crop {dim}", n) for dim, n in enumerate(room)])
        warp = self._warp(draws, first, before, size)
        if warp is not None:
            yield warp  # which reads beyond the crop
        elif options.crop is not None:
            yield Crop(first)
        yield from self._turns(draws, size)
        yield from self._value_changes(draws, size)

    def _value_changes(self, draws: SampleDraws, size: Triple) -> Iterator[Change]:
        options = self.options
        if self._happens(draws, "noise"):
            deviation = draws.uniform("noise", 0, options.noise)
            yield Noise(deviation, (draws.key("radius"), draws.key("angle")), size)
        if self._happens(draws, "blur"):
            yield blur(draws.uniform("blur", *options.blur), size)
        if self._happens(draws, "scale"):
            factor = draws.uniform("scale", 1 - options.scale, 1 + options.scale)
            yield Values(lambda x: x * x.dtype.type(factor))
        if self._happens(draws, "contrast"):
            stretch = draws.uniform("contrast", 1 - options.contrast, 1 + options.contrast)
            yield Values(lambda x: stretched(x, stretch, self._range))
        if self._happens(draws, "shift"):
            added = draws.uniform("shift", -options.shift, options.shift)
            yield Values(lambda x: x + x.dtype.type(added))
        if self._happens(draws, "low_resolution"):
            yield low_resolution(draws.uniform("resolution", options.low_resolution), size)
        if self._happens(draws, "inverted_gamma"):
            inverted = _exponent(draws, "inverted_gamma", options.inverted_gamma)
            yield Values(lambda x: curved(x, inverted, self._range, inverted=True))
        if self._happens(draws, "gamma"):
            exponent = _exponent(draws, "gamma", options.gamma)
            yield Values(lambda x: curved(x, exponent, self._range))

    def _happens(self, draws: SampleDraws, name: str) -> bool:
        likelihood = self.options.likelihood(name)
        return likelihood > 0 and draws.uniform(f"whether {name}") < likelihood

    def _warp(self, draws: SampleDraws, first: Triple, before: Triple, size: Triple) -> Warp | None:
        """Returns the affine map and the elastic deformation; None if there is neither."""
        options = self.options
        names = ("angle", "zoom", "shear", "translation", "elastic")
        angle, zoom, shear, translation, elastic = (self._happens(draws, name) for name in names)
        if not (angle or zoom or shear or translation or elastic):
            return None
        matrix, center = np.eye(3), tuple((m - 1) / 2 for m in size)
        place = [a + c for a, c in zip(first, center, strict=True)]
        if shear:
            for a, b in combinations(range(3), 2):
                matrix[a, b] = draws.uniform(f"shear {a} {b}", -options.shear, options.shear)
        if zoom:
            least, largest = options.zoom
            matrix *= draws.uniform("zoom", 1 / largest, 1 / least)
        if angle:
            most = math.radians(options.angle)
            angles = [draws.uniform(f"angle {plane}", -most, most) for plane in range(3)]
            # A volume of one slice has no rotations out of its plane.
            flat = [n == 1 for n in before]
            planes = ((1, 2), (0, 2), (0, 1))
            matrix = (
                rotation(
                    [
                        0.0 if flat[a] or flat[b] else each
                        for each, (a, b) in zip(angles, planes, strict=True)
                    ]
                )
                @ matrix
            )
        if translation:
            for dim, n in enumerate(size):
                most = options.translation * n
                place[dim] += draws.uniform(f"translation {dim}", -most, most)
        deformation = None
        if elastic:
            largest = draws.uniform("elastic", 0, options.elastic)
            keys = (draws.key("elastic 0"), draws.key("elastic 1"), draws.key("elastic 2"))
            deformation = Elastic(largest, options.elastic_spacing, keys, size)
        return Warp(matrix, center, tuple(place), before, deformation)

    def _turns(self, draws: SampleDraws, size: Triple) -> Iterator[Change]:
        order, reverses = [0, 1, 2], [False] * 3
        for axis in self.options.flip:
            reverses[SPATIAL_AXES.index(axis)] = draws.uniform(f"flip {axis}") < 0.5
        if any(reverses):
            yield _turn(order, reverses, size)
        # An image, a volume of one slice, is turned in its plane only: another turn mirrors it.
        planes = [plane for plane in combinations(range(3), 2) if min(size[d] for d in plane) > 1]
        if planes and draws.uniform("whether rotate") < self.options.rotate:
            a, b = planes[draws.below("plane", len(planes))]
            quarters = 1 + draws.below("quarters", 3)
            reverses = [dim in (a, b) for dim in range(3)]
            if quarters != 2 and size[a] == size[b]:
                order[a], order[b] = b, a
                reverses = [dim == (a if quarters == 1 else b) for dim in range(3)]
            yield _turn(order, reverses, size)


def _exponent(draws: SampleDraws, name: str, bounds: tuple[float, float]) -> float:
    """Returns an exponent: with equal probability one below 1 and one above, if there are both."""
    least, largest = bounds
    if draws.uniform(f"side of {name}") < 0.5 and least < 1:
        return draws.uniform(name, least, min(largest, 1))
    return draws.uniform(name, max(least, 1) if largest > 1 else least, largest)


def _triple(numbers: Sequence[int]) -> Triple:
    first, second, third = numbers
    return first, second, third


def _turn(order: list[int], reverses: list[bool], size: Triple) -> Turn:
    (i, j, k), (x, y, z) = order, reverses
    return Turn((i, j, k), (x, y, z), size)


def _changed(values: Array, changes: list[Change], boxes: list[Box]) -> Array:
    """Applies the changes, each from its box to the next one."""
    for change, (has, wanted) in zip(changes, pairwise(boxes), strict=True):
        values = change(values, has, wanted)
    return values
