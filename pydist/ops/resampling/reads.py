"""Inputs that outputs read at other positions: their boxes on each rank, and their exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pydist.exchange.memory_formats import all_channels_last, is_channels_last
from pydist.exchange.redistribution import BoxGatherer
from pydist.layout import Layout, Split
from pydist.partition import Box, Partition
from pydist.tensor import ShardedTensor, local_of


class ReadRange(NamedTuple):
    """First and last input that each output of a dim reads, in global indices.

    Both are int64, with the extent of the result; they need not increase with the output's index.
    """

    first: Tensor
    last: Tensor


class Reads:
    """Inputs that each rank's outputs read, and the exchange that gathers them.

    Args:
        layout: of the input.
        out: of the result, with as many dims.
        spans: inputs read along the dims in which outputs read other positions than their own.

    Attributes:
        boxes: box that each rank's outputs read, in global indices of the input.
        box: this rank's box, which `gather` returns.
        stays: whether each rank owns all inputs that it reads.
    """

    def __init__(self, layout: Layout, out: Layout, spans: Mapping[int, ReadRange]) -> None:
        self.layout, self.out = layout, out
        self.boxes = [
            _needs(own, result, spans) for own, result in zip(layout.boxes, out.boxes, strict=True)
        ]
        self.stays = all(
            need.empty or own.contains(need)
            for own, need in zip(layout.boxes, self.boxes, strict=True)
        )
        self.box = self.boxes[layout.mesh.sample_index]
        self._gatherer = BoxGatherer(layout, self.boxes)
        self._channels_last: bool | None = None

    def gather(self, x: ShardedTensor) -> Tensor:
        """Gathers the inputs in `box`; has no exchange if each rank owns all inputs it reads."""
        local = local_of(x)
        if not self.stays:
            return self._gatherer(local, self._is_channels_last(local))
        own = self.layout.box
        if any(extent > has for extent, has in zip(self.box.shape, own.shape, strict=True)):
            # An empty box that is longer than the block, for example of a batch without samples.
            return local.flatten()[:0].reshape(self.box.shape)
        for dim, (lo, extent) in enumerate(zip(self.box.lo, self.box.shape, strict=True)):
            if extent != own.shape[dim]:
                local = local.narrow(dim, max(0, lo - own.lo[dim]) if extent else 0, extent)
        return local

    def _is_channels_last(self, local: Tensor) -> bool:
        """Returns whether messages are channels-last: agreed by all ranks in the first call."""
        if self._channels_last is None:
            self._channels_last = all_channels_last(local, self.layout.mesh)
        return self._channels_last

    def local(self, dim: int, indices: Tensor) -> Tensor:
        """Returns the indices that this rank's outputs of a dim read, relative to `box`.

        Args:
            dim: the dim.
            indices: int64 [..., extent of the result], global indices of the input.
        """
        return indices[..., self.out.box.lo[dim] : self.out.box.hi[dim]] - self.box.lo[dim]

    def copies_all(self, dim: int, indices: Tensor) -> bool:
        """Returns whether these indices, made by `local`, are exactly those of `box`, in order."""
        return indices.equal(torch.arange(self.box.shape[dim]))


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Disables inference mode while a plan is made, so that training can use its tensors."""
    with torch.inference_mode(False):
        yield


def _needs(own: Box, out: Box, spans: Mapping[int, ReadRange]) -> Box:
    lo, hi = list(own.lo), list(own.hi)
    for dim, span in spans.items():
        start, stop = out.lo[dim], out.hi[dim]
        if start == stop:
            hi[dim] = lo[dim]
            continue
        lo[dim] = int(span.first[start:stop].min())
        hi[dim] = int(span.last[start:stop].max()) + 1
    return Box(lo, hi)


def moved_points(
    layout: Layout, shape: Sequence[int], moved: Mapping[int, Sequence[int]]
) -> Layout:
    """Returns a layout of another shape whose split dims are split at other points.

    Args:
        layout: the layout to start from.
        shape: the new global shape.
        moved: inner and outer points by dim; unsplit dims are ignored.
    """
    splits: dict[int, Split | None] = {}
    for dim, points in moved.items():
        split = layout.splits[dim]
        if split is not None:
            inner = [min(max(0, p), shape[dim]) for p in points[1:-1]]
            splits[dim] = Split(split.axes, Partition([0, *inner, shape[dim]]))
    return layout.replace(shape, splits)


def take_indices(x: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Computes `x.index_select(dim, indices)`, and keeps channels-last memory."""
    if not is_channels_last(x):
        return x.index_select(dim, indices)
    return x.movedim(1, -1).index_select(_after_move(dim, x.dim()), indices).movedim(-1, 1)


def _after_move(dim: int, dims: int) -> int:
    """Returns the position of a dim after the channels are moved to the end."""
    return dims - 1 if dim == 1 else dim - (dim > 1)
