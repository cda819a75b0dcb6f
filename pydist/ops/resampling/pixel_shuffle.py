"""Pixel and channel shuffles, which run on the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pydist.layout import Layout, Split
from pydist.ops.channels import with_channels
from pydist.partition import Partition
from pydist.tensor import ShardedTensor, implements, local_of, wrap
from pydist.tensor.operands import redistribute


@implements(torch.pixel_shuffle)
def pixel_shuffle(input: ShardedTensor, upscale_factor: int) -> ShardedTensor:
    """Rearranges [*, C r², H, W] to [*, C, H r, W r]; all points of H and W are multiplied by r.

    Raises:
        RuntimeError: as torch on the full tensor.
    """
    return _rearranged(torch.pixel_shuffle, input, upscale_factor)


@implements(torch.pixel_unshuffle)
def pixel_unshuffle(input: ShardedTensor, downscale_factor: int) -> ShardedTensor:
    """Rearranges [*, C, H r, W r] to [*, C r², H, W]; points within a block of r move to its start.

    Raises:
        RuntimeError: as torch on the full tensor.
    """
    return _rearranged(torch.pixel_unshuffle, input, downscale_factor)


def _rearranged(function: Callable[..., Any], x: ShardedTensor, factor: int) -> ShardedTensor:
    shape = function(torch.empty(x.shape, device="meta"), factor).shape
    if x.layout.splits[-3] is not None:
        x = redistribute(x, x.layout.replace(changes={x.dim() - 3: None}))
    up = function is torch.pixel_shuffle
    if not up:
        x = redistribute(x, _in_blocks(x.layout, factor))
    changes = {}
    for dim in (x.dim() - 2, x.dim() - 1):
        split = x.layout.splits[dim]
        if split is not None:
            points = [p * factor if up else p // factor for p in split.partition.points]
            changes[dim] = Split(split.axes, Partition(points))
    layout = x.layout.replace(shape, changes)
    local = local_of(x)
    # torch returns empty tensors, and their gradients, with the old shape.
    local = function(local, factor) if local.numel() else local.reshape(layout.local_shape)
    return wrap(local, layout, x)


def _in_blocks(layout: Layout, factor: int) -> Layout:
    """Returns the layout with all points of the last two dims at multiples of the factor."""
    changes = {}
    for dim in (len(layout.shape) - 2, len(layout.shape) - 1):
        split = layout.splits[dim]
        if split is not None:
            points = [p - p % factor for p in split.partition.points]
            changes[dim] = Split(split.axes, Partition(points))
    return layout.replace(changes=changes)


@implements(torch.channel_shuffle)
def channel_shuffle(input: ShardedTensor, groups: int) -> ShardedTensor:
    """Shuffles the channels (dim 1) over groups.

    Raises:
        RuntimeError: as torch on the full tensor.
    """
    input = with_channels(input, None)
    return wrap(torch.channel_shuffle(local_of(input), groups), input.layout, input)
