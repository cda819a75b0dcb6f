"""Boxes of samples, joined from the pieces that ranks hold, and from files where none does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from pydist.data.augment.source import Augmented
from pydist.data.blocks import StoredSource
from pydist.data.store.entry import Entry, copy
from pydist.data.store.form import BlockForm
from pydist.data.store.holdings import Holdings
from pydist.data.store.source import BatchSource
from pydist.interop import as_tensor
from pydist.partition import Box, subtract

_T = TypeVar("_T")


class HeldPart(NamedTuple):
    """Part of a sample, unchanged, that is here or on its way.

    Attributes:
        box: in the sample's indices (D, H, W).
        find: returns its values and targets, once they are here; None if they could not be read.
    """

    box: Box
    find: Callable[[], Entry | None]


class BoxSource(BatchSource):
    """`BlockSource` of one batch that joins boxes of unchanged samples from pieces and files.

    A piece that could not be read is read from the file as without a store: with the same result,
    or the same error. In an epoch its samples are those of `augmented`.

    Args:
        augmented: the changed samples.
        form: of the pieces.
        holdings: see `BatchSource`.
        reading: is held during reads of files, whose bytes are counted.
    """

    def __init__(
        self, augmented: Augmented, form: BlockForm, holdings: Holdings, reading: threading.Lock
    ) -> None:
        super().__init__(augmented.dataset, form.raw, {}, (), (), holdings)
        self.pieces: dict[int, list[HeldPart]] = {}
        """Pieces by sample."""
        self._augmented, self._dtype, self._reading = augmented, form.dtype, reading

    def in_epoch(self, epoch: int) -> Augmented:
        """Returns the changed samples of an epoch."""
        return self._augmented.in_epoch(epoch).over(self)

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Joins the inputs of a box; see `BlockSource.read_block`."""
        self.figures.blocks += 1
        channels, *extents = self.dataset.shape_of(index)
        whole = Box((0, 0, 0, 0), (channels, *extents)) if box is None else box
        wanted = Box(whole.lo[1:], whole.hi[1:])
        first, after = whole.lo[0], whole.hi[0]
        joined = torch.empty((after - first, *wanted.shape), dtype=self._dtype)
        missing = [wanted]
        for piece, entry, common in self._found(index, wanted):
            values = entry.block[first:after][slices_of(common, piece.box)]
            copy(values, joined[slices_of(common, wanted)])
            missing = [rest for each in missing for rest in subtract(each, common)]
        self.figures.file_blocks += bool(missing)
        for rest in missing:
            self._read_rest(index, rest, whole, joined[slices_of(rest, wanted)])
        if not self._raw:
            return joined
        inputs = torch.empty(joined.shape, dtype=self.dtype)
        if self._normalize(index, whole, joined, inputs):
            return inputs
        return as_tensor(self.from_file(lambda: self.dataset.read_block(index, whole)))

    def read_labels(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Joins the labels of a box; see `BlockSource.read_labels`."""
        wanted = Box((0, 0, 0), self.dataset.shape_of(index)[1:]) if box is None else box
        joined = torch.empty(wanted.shape, dtype=torch.int64)
        missing = [wanted]
        for piece, entry, common in self._found(index, wanted):
            copy(entry.targets[slices_of(common, piece.box)], joined[slices_of(common, wanted)])
            missing = [rest for each in missing for rest in subtract(each, common)]
        for rest in missing:
            labels = self.from_file(partial(self.dataset.read_labels, index, rest))
            copy(as_tensor(labels), joined[slices_of(rest, wanted)])
        return joined

    def from_file(self, read: Callable[[], _T]) -> _T:
        """Calls a function that reads from a file, in one thread at a time."""
        with self._reading:
            return super().from_file(read)

    def target(self, index: int) -> Tensor:
        """Returns the values to predict; see `BlockSource.target`."""
        for piece in self.pieces.get(index, ()):
            entry = piece.find()
            if entry is not None and entry.is_good:
                return entry.targets
        return as_tensor(self.from_file(lambda: self.dataset.target(index)))

    def _found(self, index: int, wanted: Box) -> Iterator[tuple[HeldPart, Entry, Box]]:
        """Yields the pieces that are good, with what they have in common with a box."""
        for piece in self.pieces.get(index, ()):
            common = piece.box.intersect(wanted)
            if not common.empty:
                entry = piece.find()
                if entry is not None and entry.is_good:
                    yield piece, entry, common

    def _read_rest(self, index: int, rest: Box, whole: Box, room: Tensor) -> None:
        """Reads a part of a box that no rank holds from the file."""
        box = Box((whole.lo[0], *rest.lo), (whole.hi[0], *rest.hi))
        if self._raw:
            stored = cast(StoredSource, self.dataset)
            values = torch.empty(room.shape, dtype=room.dtype)
            self.from_file(lambda: stored.read_stored(index, box, values))
            copy(values, room)
        else:
            copy(as_tensor(self.from_file(lambda: self.dataset.read_block(index, box))), room)


def slices_of(box: Box, within: Box) -> tuple[Any, ...]:
    """Returns the place of a box in an array [..., D, H, W] of another one."""
    return ..., *box.shift([-first for first in within.lo]).slices
