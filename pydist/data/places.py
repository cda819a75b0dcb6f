"""Where blocks of samples are, in a sample and in the array of a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pydist.data.axes import Axes, file_order, label_file_order
from pydist.errors import UsageError

if TYPE_CHECKING:
    from pydist.partition import Box


class BlockPlace(NamedTuple):
    """Where a block of a sample is.

    Attributes:
        lo: its first corner in the sample: (C, D, H, W), or (D, H, W) of labels.
        shape: its extents.
        window: its slices in the array of the file.
        stored: the extents of these slices.
    """

    lo: tuple[int, ...]
    shape: tuple[int, ...]
    window: tuple[slice, ...]
    stored: tuple[int, ...]

    def room(self, out: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns the destination of the block: `out`, checked, or a new tensor.

        Raises:
            UsageError: `out` has another shape or type, or is not contiguous.
        """
        if out is None:
            return torch.empty(self.shape, dtype=dtype)
        if out.shape != self.shape or out.dtype != dtype or not out.is_contiguous():
            raise UsageError(
                f"out is {tuple(out.shape)} {out.dtype}: contiguous {self.shape} {dtype} is needed"
            )
        return out


@lru_cache(maxsize=1024)  # samples have few shapes and offsets, and a rank has few blocks of them
def place_of(
    axes: Axes, shape: tuple[int, ...], offset: tuple[int, int, int], box: Box | None
) -> BlockPlace:
    """Returns where a block of a sample is.

    Args:
        axes: order of the axes of an array of samples.
        shape: extents of the sample, (C, D, H, W); of labels (D, H, W).
        offset: first voxel (D, H, W) of the sample in the array.
        box: the block, in the sample's indices; None for all of it.

    Raises:
        UsageError: the block is not in the sample.
    """
    lo, hi = ((0,) * len(shape), shape) if box is None else (tuple(box.lo), tuple(box.hi))
    inside = len(lo) == len(shape) and all(
        0 <= a <= b <= n for a, b, n in zip(lo, hi, shape, strict=True)
    )
    if not inside:
        raise UsageError(f"block {lo} to {hi} is not in a sample of {shape}")
    starts: Sequence[int] = offset if len(shape) == len(offset) else (0, *offset)
    of_volume = [slice(o + a, o + b) for o, a, b in zip(starts, lo, hi, strict=True)]
    order = label_file_order if len(shape) == len(offset) else file_order
    window = order(axes, of_volume)
    extents = tuple(b - a for a, b in zip(lo, hi, strict=True))
    return BlockPlace(lo, extents, window, tuple(each.stop - each.start for each in window))
