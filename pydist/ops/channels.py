"""Splits channels over the ranks along the mesh's channel axis.

Layers with weights take turns. An output-split layer computes a part of its output channels on each
rank, from all input channels; its backward sums dL/dx over the ranks. An input-split layer computes
partial sums from the rank's part of the input channels, which forward sums over the ranks. Layers
between them, such as norms and activations, run on the rank's channels.

Layers with thin blocks may do the same along the spatial axes, see `pydist.ops.coarsening`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from torch import Tensor

from pydist.exchange.own_slice import is_sharded_weight
from pydist.grid import CHANNEL_AXIS
from pydist.layout import Layout, Split, split_jointly
from pydist.mesh import Mesh
from pydist.partition import Partition
from pydist.tensor import ShardedTensor, refusal
from pydist.tensor.operands import distribute_tensor, parameter_for, redistribute


def output_split(layout: Layout, channels: int, groups: int = 1) -> Split | None:
    """Returns the split of a layer's output channels along the channel axis.

    Args:
        layout: of the layer's input.
        channels: number of output channels.
        groups: of channels; a group stays on one rank.

    Returns:
        The split, even or by the mesh's shares; `None` if the axis has one rank, the input is cut
        along it, or there are fewer channels (or groups) than ranks.
    """
    if CHANNEL_AXIS in layout.used_axes:
        return None
    return channel_split(layout.mesh, channels, groups)


def channel_split(
    mesh: Mesh, channels: int, groups: int = 1, axes: tuple[str, ...] = (CHANNEL_AXIS,)
) -> Split | None:
    """Returns the split of channels along the channel axis; `None` if there are too few.

    Args:
        mesh: the mesh.
        channels: number of channels.
        groups: of channels; a group stays on one rank.
        axes: other axes along which the channels are split.
    """
    units = groups if groups > 1 else channels
    split = split_jointly(mesh, units, axes)
    if split is None or units < split.partition.parts:
        return None
    points = [p * (channels // units) for p in split.partition.points]
    return Split(split.axes, Partition(points))


def with_channels(x: ShardedTensor, split: Split | None) -> ShardedTensor:
    """Redistributes a tensor so that its dim 1 has a split; `None` gives each rank all channels."""
    layout = x.layout
    if layout.splits[1] == split:
        return x
    return redistribute(x, layout.replace(changes={1: split}))


def free_channel_axis(x: ShardedTensor) -> ShardedTensor:
    """Gathers a layer's input along the channel axis, for a sharded weight (`pydist.slices`).

    Such a layer always splits its outputs, since the weight would have to be moved otherwise.
    """
    layout = x.layout
    if CHANNEL_AXIS not in layout.used_axes:
        return x
    cut = {d: s for d, s in enumerate(layout.splits) if s is not None and CHANNEL_AXIS in s.axes}
    return gathered_input(x, layout.replace(changes=dict.fromkeys(cut)))


def gathered_input(x: ShardedTensor, layout: Layout) -> ShardedTensor:
    """Redistributes a layer's input, for this layer only.

    If the layer then uses more axes, each rank has a part of the gradient, and the adjoint of the
    gathering adds the parts (reduce-scatter).
    """
    found = redistribute(x, layout)
    found._is_gathered |= found._shard is not x._shard
    return found


def on_plain(
    function: Callable[..., Any],
    handler: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    *args: Any,
) -> Tensor:
    """Returns a layer's plain result for a plain input and a sharded weight (`pydist.slices`).

    The ranks compute the channels of their slices and gather them. So the input must be equal on
    all ranks of the sample group, which compare it.

    Args:
        function: torch's call, for errors.
        handler: the handler of the call, for a sharded input.
        input: the plain input.
        weight: of the layer.
        args: further arguments of the call.

    Raises:
        NotSupported: the weight is a sharded tensor, but no parameter.
        UsageError: the ranks hold different inputs.
    """
    if not isinstance(weight, ShardedTensor) or not is_sharded_weight(weight):
        raise refusal(function, (input, weight), {}, "the input is plain and the weight sharded")
    result = handler(distribute_tensor(input, weight.mesh, {}), weight, *args)
    whole: Tensor = result.full_tensor()
    return whole


@overload
def parameter_of_channels(tensor: Tensor, layout: Layout) -> Tensor: ...
@overload
def parameter_of_channels(tensor: Tensor | None, layout: Layout) -> Tensor | None: ...
def parameter_of_channels(tensor: Tensor | None, layout: Layout) -> Tensor | None:
    """Returns the values [C] of a per-channel parameter for this rank's channels of a layout."""
    split = layout.splits[1]
    if tensor is None or split is None:
        return parameter_for(tensor, layout)
    return parameter_for(tensor, layout, Layout(layout.mesh, tuple(tensor.shape), (split,)))


def own_channels(values: Tensor, layout: Layout) -> Tensor:
    """Returns the elements of a buffer [C] for this rank's channels of a layout; a view."""
    box = layout.box
    return values if layout.splits[1] is None else values[box.lo[1] : box.hi[1]]


def gather_channels(values: Tensor, layout: Layout) -> Tensor:
    """Gathers values [..., C of this rank] of a layout's channels to [..., C]. Collective."""
    split = layout.splits[1]
    if split is None:
        return values
    padded = values.new_zeros(*values.shape[:-1], max(split.partition.sizes))
    padded[..., : values.shape[-1]] = values
    with layout.mesh.session.timers.measure("redistribute"):
        rows = layout.mesh.group(split.axes).all_gather(padded)
    whole = values.new_empty(*values.shape[:-1], split.partition.extent)
    for (lo, hi), row in zip(split.intervals(layout.mesh), rows, strict=True):
        whole[..., lo:hi] = row[..., : hi - lo]
    return whole
