"""Cost model that moves layers with thin blocks onto fewer ranks, or from space to channels.

Late layers of a network are small. Their blocks can be empty or thinner than the layer's halo, and
an exchange then costs more than the computation that it saves. If the ranks gather such a layer's
input, each of them computes the whole layer, or some of its output channels (`idle_split`).
Correctness does not depend on this module: thin and empty blocks give exact results. It only
compares estimated times, by the costs of the machine if `pydist env --bench` has measured it
(`Mesh.hardware`), else by those of the profile "cpu".

It also chooses what the ranks of a layer with cut input channels exchange (`channel_form`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from pydist.grid import CHANNEL_AXIS
from pydist.hardware import CPU, Hardware
from pydist.layout import Layout, Split, split_jointly
from pydist.ops.windows import Window, WindowPlan
from pydist.partition import Box, Partition

ELEMENT_BYTES = 4
# Small convolutions take this many times as long as large ones with as many flops.
_SMALL = 4
# A layer with thin blocks is rarely the last: this many layers share the cost of moving.
LAYERS = 3

ChannelForm = Literal["sum", "scatter", "gather"]
"""What the ranks of a layer with cut input channels exchange:

- "sum": all-reduce of partial sums. The result is whole; backward exchanges nothing.
- "scatter": reduce-scatter of partial sums. The result is cut; backward gathers its gradient.
- "gather": the input. The result is cut; backward adds up the parts of dL/dx (reduce-scatter).
"""


@dataclass(frozen=True)
class Costs:
    """Costs that work and messages have on one rank, in seconds.

    Attributes:
        exchange: of an exchange besides its messages: calls, packing, waking up.
        message: of a message besides its bytes.
        byte: of a byte that is sent.
        flop: of a flop of small convolutions.
    """

    exchange: float
    message: float
    byte: float
    flop: float


def costs_of(hardware: Hardware) -> Costs:
    """Returns the costs of the ranks of some hardware."""
    link = hardware.within
    flop = _SMALL / hardware.flops["float32"]
    return Costs(hardware.exchange, link.latency, 1 / link.bandwidth, flop)


# Of the built-in profile, for choices that do not depend on a measured one.
EXCHANGE_S, _, BYTE_S, FLOP_S = astuple(costs_of(CPU))
# Time per byte of a result, on one rank, for what follows a layer before the next one (a norm and
# an activation, forward and backward, about 8 accesses to memory). A cut result divides it.
# `benchmarks/python/channel_forms.py` measures the resulting choices.
BETWEEN_S = 8 / CPU.bandwidth


@dataclass(frozen=True)
class Workload:
    """Facts that a window operation's cost depends on, such as its flops per output element.

    Attributes:
        window: of the operation.
        out_channels: of its result.
        flops_per_output: of an element of its result.
        weights: their number.
        splits: whether the ranks may split its output channels; the input is then needed whole.
    """

    window: Window
    out_channels: int
    flops_per_output: float
    weights: int = 0
    splits: bool = False


def coarsen_if_faster(layout: Layout, work: Workload) -> Layout:
    """Chooses the layout with the least estimated time of a window operation, with backward.

    With several sample groups the choice assumes one sample: groups may have different numbers of
    samples, and a norm over all groups needs the same layout in each.

    Args:
        layout: of the input; kept unless one of its blocks is thinner than the halo.
        work: the operation.

    Returns:
        `layout`, or a layout over fewer ranks.
    """
    mesh = layout.mesh
    if mesh.keep_thin_blocks or not _has_thin_block(layout, work.window):
        return layout
    key = ("coarsening", layout, work)

    def choose() -> Layout:
        judged = _judged(layout)
        options = [judged, *_coarser(judged)]
        chosen = min(options, key=lambda option: _seconds(judged, option, work))
        return layout if chosen is judged else chosen.replace(shape=layout.shape)

    return mesh.session.plan(key, choose)


def idle_axes(layout: Layout) -> tuple[str, ...]:
    """Returns the axes over which the ranks may split the outputs of a layer with a whole input.

    There are none on meshes with a channel axis, along which layers split their channels anyway.
    """
    grid = layout.mesh.grid
    if layout.used_axes or layout.mesh.keep_thin_blocks or grid.size((CHANNEL_AXIS,)) > 1:
        return ()
    return grid.split(layout.unused_axes)


def idle_split(layout: Layout, outputs: Sequence[int], flops: float, weights: int) -> Split | None:
    """Chooses whether the ranks split the output channels of a layer with a whole input.

    Otherwise each of them computes the whole layer. The choice assumes as many samples as
    `coarsen_if_faster`.

    Args:
        layout: of the input.
        outputs: shape of the result.
        flops: of a sample.
        weights: their number.

    Returns:
        The split of dim 1 of the result; `None` if computing all of it is estimated to be faster.
    """
    axes = idle_axes(layout)
    split = split_jointly(layout.mesh, outputs[1], axes)
    if split is None or outputs[1] < split.partition.parts:
        return None

    def pays() -> bool:
        costs, judged = costs_of(layout.mesh.hardware), _judged(layout)
        n = judged.shape[0]
        seconds = 3 * max(n * flops * costs.flop, weights * ELEMENT_BYTES * costs.byte)
        seconds *= max(1.0, layout.mesh.ranks_per_core)
        sizes = math.prod(judged.shape), n * math.prod(outputs[1:])
        on_channels = seconds_on_channels(costs, split.partition.parts, outputs[1], seconds, sizes)
        return on_channels < seconds

    key = ("idle split", layout, tuple(outputs), flops, weights)
    return split if layout.mesh.session.plan(key, pays) else None


def seconds_on_channels(
    costs: Costs, parts: int, channels: int, seconds: float, sizes: tuple[float, float]
) -> float:
    """Estimates the time of a layer, with backward, whose output channels the ranks split.

    The ranks add up their parts of dL/dx. The next layer, which splits its inputs, adds up its
    outputs: as many as these, it is assumed.

    Args:
        costs: of the ranks.
        parts: of the channels.
        channels: their number.
        seconds: that the whole layer takes on one rank.
        sizes: elements of the input and of the result.
    """
    fixed = costs.exchange + math.ceil(math.log2(parts)) * costs.message
    moved = 2 * (parts - 1) / parts * sum(sizes) * ELEMENT_BYTES * costs.byte
    # They must pay as well where the layer is as fast as a large one, as on devices.
    return math.ceil(channels / parts) / channels * seconds + _SMALL * (2 * fixed + moved)


def _judged(layout: Layout) -> Layout:
    """Returns the layout with the number of samples that choices assume."""
    if layout.splits[0] is None and (layout.mesh.data_size > 1 or not layout.shape[0]):
        return layout.replace(shape=(1, *layout.shape[1:]))
    return layout


def _has_thin_block(layout: Layout, window: Window) -> bool:
    for dim, (kernel, stride, dilation) in enumerate(
        zip(window.kernel, window.stride, window.dilation, strict=True)
    ):
        split = layout.splits[dim + 2]
        reach = dilation * (kernel - 1)
        halo = max(reach // 2, reach - reach // 2 - (stride - 1))
        if split is not None and min(split.partition.sizes) < halo:
            return True
    return False


def _coarser(layout: Layout) -> Iterator[Layout]:
    """Yields layouts that join the blocks of 2, 4, ... neighbors along all split dims."""
    spatial = [d for d in layout.split_dims if d >= 2]
    most = max((layout.splits[d].partition.parts for d in spatial), default=1)  # type: ignore[union-attr]
    together = 2
    while together < most:
        yield layout.replace(changes={d: _joined(layout.splits[d], together) for d in spatial})
        together *= 2
    yield layout.whole()


def _joined(split: Split | None, together: int) -> Split:
    """Returns a split in which the first of each `together` ranks owns the blocks of all."""
    assert split is not None
    points = split.partition.points
    parts = split.partition.parts
    joined = [points[0]]
    for part in range(parts):
        joined.append(points[min(parts, (part // together + 1) * together)])
    return Split(split.axes, Partition(joined))


def _seconds(current: Layout, option: Layout, work: Workload) -> float:
    mesh = current.mesh
    costs, plan = costs_of(mesh.hardware), WindowPlan(option, work.window, work.out_channels)
    # Forward, dgrad and wgrad cost about the same; with few voxels each is bound by the weights.
    weights = work.weights * ELEMENT_BYTES * costs.byte
    by_rank = [
        3 * max(box.volume * work.flops_per_output * costs.flop, weights)
        for box in plan.out.boxes
        if not box.empty
    ]
    compute = max(*by_rank, sum(by_rank) * mesh.ranks_per_core / mesh.sample_size)
    halo = 2 * _exchange_seconds(option.boxes, plan.needed, costs)
    if work.splits and (axes := idle_axes(option)):
        parts, sizes = mesh.grid.size(axes), (math.prod(option.shape), math.prod(plan.out.shape))
        if work.out_channels >= parts:
            split = seconds_on_channels(costs, parts, work.out_channels, compute, sizes)
            compute = min(compute, split)
    move = 0.0 if option is current else 2 * _exchange_seconds(current.boxes, option.boxes, costs)
    return LAYERS * (compute + halo) + move


def _exchange_seconds(owned: Sequence[Box], needed: Sequence[Box], costs: Costs) -> float:
    """Estimates the time of an exchange in seconds, for the rank that receives most."""
    slowest = 0.0
    for rank, need in enumerate(needed):
        own = owned[rank].intersect(need).volume
        pieces = {box: box.intersect(need).volume for box in owned}
        if own == sum(pieces.values()):
            continue
        foreign = [n for r, box in enumerate(owned) if r != rank and (n := pieces[box])]
        nbytes = sum(foreign) * ELEMENT_BYTES
        slowest = max(slowest, len(foreign) * costs.message + nbytes * costs.byte)
    return costs.exchange + slowest if slowest else 0.0


def conv_workload(window: Window, weight_shape: Sequence[int], *, splits: bool = False) -> Workload:
    """Returns the workload of a convolution with a weight [Co, Ci / groups, *kernel]."""
    flops = 2.0 * math.prod(weight_shape[1:])
    return Workload(window, weight_shape[0], flops, math.prod(weight_shape), splits)


def pool_workload(window: Window, channels: int) -> Workload:
    """Returns the workload of a pooling."""
    return Workload(window, channels, float(math.prod(window.kernel)))


def channel_form(layout: Layout, outputs: tuple[int, ...]) -> ChannelForm:
    """Chooses the form with the least estimated time of a layer, with backward.

    The next layer counts as well, as one with as many outputs: for a whole result it adds up parts
    of dL/dx in backward (all-reduce), for a cut one it exchanges once in each direction. All forms
    compute the same products. With several sample groups the choice assumes one sample, as
    `coarsen_if_faster` does.

    Args:
        layout: of the input, whose dim 1 is cut.
        outputs: shape of the result; it can be cut along the same axes.
    """
    key = ("channel form", layout, outputs)
    return layout.mesh.session.plan(key, lambda: _choose_form(layout, outputs))


def _choose_form(layout: Layout, outputs: tuple[int, ...]) -> ChannelForm:
    split = layout.splits[1]
    assert split is not None
    of_input, of_result = (_bytes(layout, shape) for shape in (layout.shape, outputs))
    return cheapest_form(split.partition.parts, of_input, of_result)


def cheapest_form(parts: int, of_input: float, of_result: float) -> ChannelForm:
    """Returns the form with the least estimated time, as `channel_form` does.

    Args:
        parts: ranks that the channels are cut over.
        of_input: bytes of all channels of one rank's block of the input.
        of_result: those of the result.
    """
    moved = (parts - 1) / parts * BYTE_S
    both_ways = 2 * (EXCHANGE_S + of_result * moved)
    between = of_result * BETWEEN_S
    seconds: dict[ChannelForm, float] = {
        "sum": 2 * EXCHANGE_S + 4 * of_result * moved + between,
        "scatter": 2 * both_ways + between / parts,
        "gather": 2 * (EXCHANGE_S + of_input * moved) + both_ways + between / parts,
    }  # the first of equals: unlike "gather", "scatter" saves only a part of the input
    return min(seconds, key=seconds.__getitem__)


def _bytes(layout: Layout, shape: tuple[int, ...]) -> float:
    """Returns the size of all channels of one rank's block of a tensor."""
    n = 1 if layout.mesh.data_size > 1 else max(1, shape[0])
    cuts: list[Split] = [s for d, s in enumerate(layout.splits) if s is not None and d != 1]
    return ELEMENT_BYTES * n * math.prod(shape[1:]) / math.prod(s.partition.parts for s in cuts)
