"""Splits channels of convolutions and transposed convolutions; see `pydist.ops.channels`.

The weight of a convolution is [Co, Ci / groups, ...], of a transposed one [Ci, Co / groups, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.adjoints import sum_parts
from pydist.exchange.function import without_autocast
from pydist.exchange.own_slice import is_sharded_weight
from pydist.exchange.redistribution import scatter_parts
from pydist.layout import Layout, Split
from pydist.ops.channels import (
    channel_split,
    free_channel_axis,
    gathered_input,
    output_split,
    parameter_of_channels,
    with_channels,
)
from pydist.ops.coarsening import channel_form, idle_axes, idle_split
from pydist.ops.conv.local_conv import in_autocast_type
from pydist.ops.dtypes import NARROW, require_same_dtype
from pydist.ops.fusion.relu import ConvOutputs
from pydist.partition import Partition
from pydist.tensor import ShardedTensor, local_of, refusal, wrap
from pydist.tensor.deferred import Deferred
from pydist.tensor.operands import operand_in, parameter_for


def refuse_unfit(
    function: Callable[..., Any], dims: int, input: ShardedTensor, weight: Tensor
) -> None:
    """Raises `NotSupported` for an input without a batch dim, or of complex numbers."""
    if input.dim() != dims + 2:
        raise refusal(function, (input, weight), {}, f"expected [N, C] and {dims} spatial dims")
    if input.is_complex():
        raise refusal(function, (input, weight), {}, "complex numbers: convolve their parts")


class SplitChannels(NamedTuple):
    """How a layer splits its channels.

    Attributes:
        input: the input, whose channels may have been redistributed.
        outputs: split of the output channels that each rank computes. If only the input's channels
            are split, each rank computes partial sums of all outputs.
        sums: split of the sum of these; `None` if each rank gets all of it.
    """

    input: ShardedTensor
    outputs: Split | None
    sums: Split | None = None

    def result(self, out: Layout) -> Layout:
        """Returns the layout of the result, where ranks compute outputs in the layout `out`."""
        return out if self.sums is None else out.replace(changes={1: self.sums})


def split_channels(
    function: Callable[..., Any], input: ShardedTensor, weight: Tensor, groups: int,
    extents: Callable[[], tuple[int, ...]], *, is_transposed: bool,
) -> SplitChannels:  # fmt: skip
    """Chooses how a layer splits its channels; a sharded weight is not moved, and splits outputs.

    Args:
        function: torch's call, for errors.
        input: of the layer.
        weight: of all channels.
        groups: of channels.
        extents: returns the spatial extents of the result.
        is_transposed: whether the convolution is a transposed one.

    Raises:
        UsageError: the input does not fit the weight.
    """
    channels = input.shape[1]
    if is_sharded_weight(weight):
        of_groups = None if groups == 1 else channel_split(input.mesh, channels, groups)
        if of_groups is None or input.layout.splits[1] != of_groups:
            input = free_channel_axis(input)
    split = input.layout.splits[1]
    outputs = weight.shape[1] * groups if is_transposed else weight.shape[0]
    found = output_split(input.layout, outputs, groups) if split is None else None
    if split is None and found is None and groups == 1 and idle_axes(input.layout):
        of_result = (input.shape[0], outputs, *extents())
        taps = input.shape[2:] if is_transposed else of_result[2:]
        flops = 2.0 * weight.numel() * math.prod(taps)
        found = idle_split(input.layout, of_result, flops, weight.numel())
    if split is None and found is None:
        return SplitChannels(input, None)  # torch checks the shapes
    expected = weight.shape[0] if is_transposed else weight.shape[1] * groups
    if channels != expected or channels % groups or outputs % groups:
        raise UsageError(
            f"{function.__name__} in {groups} groups: an input of {channels} channels does not fit "
            f"a weight of shape {tuple(weight.shape)}"
        )
    of_group = channels // groups, outputs // groups
    if split is not None:
        is_apart = groups == 1 or not any(p % of_group[0] for p in split.partition.points)
        if is_apart and min(split.partition.sizes) > 0:
            if groups > 1:
                return SplitChannels(input, _scaled(split, *of_group))
            sums = channel_split(input.mesh, outputs, axes=split.axes)
            shape = (input.shape[0], outputs, *extents())
            form = "sum" if sums is None else channel_form(input.layout, shape)
            if form != "gather":
                return SplitChannels(input, None, sums if form == "scatter" else None)
        input = gathered_input(input, input.layout.replace(changes={1: None}))
        found = channel_split(input.mesh, outputs, groups, split.axes)
    if found is not None and groups > 1:
        input = with_channels(input, _scaled(found, *reversed(of_group)))
    return SplitChannels(input, found)


def _scaled(split: Split, extent: int, wanted: int) -> Split:
    """Returns the split with the same groups of channels, if groups have another extent."""
    points = [p // extent * wanted for p in split.partition.points]
    return Split(split.axes, Partition(points))


def own_operands(
    function: Callable[..., Any], split: SplitChannels, weight: Tensor, bias: Tensor | None,
    out: Layout, groups: int, *, is_transposed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns this rank's parts of the input, the weight and the bias, in autocast's type.

    Args:
        function: torch's call, for errors.
        split: of the channels.
        weight: of all channels.
        bias: [Co] or `None`.
        out: layout of the outputs that each rank computes.
        groups: of channels.
        is_transposed: whether the convolution is a transposed one.

    Raises:
        UsageError: they have different dtypes.
    """
    input, layout = split.input, split.input.layout
    inputs, outputs = layout.splits[1], out.splits[1]
    if inputs is None and outputs is None:
        local, weight, bias = local_of(input), parameter_for(weight, out), parameter_for(bias, out)
    else:
        splits = [inputs, outputs] if is_transposed else [outputs, inputs]
        if groups > 1:
            splits[1] = None  # a group's channels, which are all on one rank
        within, rest = layout if outputs is None else out, (None,) * (weight.dim() - 2)
        of_weight = Layout(layout.mesh, tuple(weight.shape), [*splits, *rest])
        weight = parameter_for(weight, within, of_weight)
        bias = parameter_of_channels(bias, split.result(out))
        local = operand_in(input, layout, within)
    # Autocast's rule for convolutions, applied here because halos must have the same dtype.
    local, weight, bias = in_autocast_type(local, weight, bias)
    require_same_dtype(function, local, weight, bias)
    return local, weight, bias


def own_weights(
    layout: Layout, out: Layout, weight: tuple[int, ...], groups: int, *, is_transposed: bool
) -> list[tuple[tuple[int, ...], int]]:
    """Returns the shape of each rank's part of a weight, and its number of groups.

    Args:
        layout: of the input.
        out: of the result.
        weight: shape of the full weight.
        groups: of the full convolution.
        is_transposed: whether the weight is [Ci, Co / groups, ...] instead of [Co, Ci / groups,
            ...].
    """
    if layout.splits[1] is None and out.splits[1] is None:
        return [(weight, groups)] * len(layout.boxes)
    outputs = weight[1] * groups if is_transposed else weight[0]
    found = []
    for own, result in zip(layout.boxes, out.boxes, strict=True):
        n = 1 if groups == 1 else result.shape[1] // (outputs // groups)
        pair = (own.shape[1], result.shape[1] // n)
        if not is_transposed:
            pair = (result.shape[1], own.shape[1] // n)
        found.append(((*pair, *weight[2:]), n))
    return found


def layer_result(
    run: Callable[[Tensor | None], tuple[Tensor, Deferred]], bias: Tensor | None,
    split: SplitChannels, out: Layout,
) -> ShardedTensor:  # fmt: skip
    """Returns a layer's result: its outputs, or the sum of the ranks' partial ones.

    Args:
        run: computes this rank's outputs with a bias or none; returns them and their state.
        bias: this rank's part, as `own_operands` returns it, or `None`.
        split: of the channels.
        out: layout of the outputs that each rank computes.
    """
    input = split.input
    with without_autocast(input.device):
        if input.layout.splits[1] is not None and out.splits[1] is None:
            return _add_parts(run(None)[0], bias, split, out)
        shard, deferred = run(bias)
    result = wrap(shard, out, input)
    result._deferred = deferred
    return result


def _add_parts(
    partial: Tensor, bias: Tensor | None, split: SplitChannels, out: Layout
) -> ShardedTensor:
    """Adds the bias to the sum of the ranks' partial sums [N, Co, ...]; see `layer_result`."""
    # In half precision the sum is rounded once, like that of one device.
    wide = partial.float() if partial.dtype in NARROW else partial
    result, inputs = split.result(out), split.input.layout.splits[1]
    assert inputs is not None
    if split.sums is None:
        total = sum_parts(wide, out.mesh, inputs.axes)
    else:
        total = scatter_parts(wide, out, split.sums)
    if bias is not None:
        total = total + bias.view(-1, *(1 for _ in total.shape[2:]))
    added = wrap(total.to(partial.dtype), result, split.input)
    added._deferred = ConvOutputs(local_of(added))
    return added
