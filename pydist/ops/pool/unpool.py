"""Maximum unpooling: values are placed at given indices, in any rank's block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.adjoints import average_grad, gather_box
from pydist.exchange.exchanger import Exchanger
from pydist.layout import Layout, Split
from pydist.ops.dtypes import result_dtype
from pydist.ops.windows import Window, as_tuple, symmetric
from pydist.partition import Box, Partition
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal, wrap
from pydist.tensor.operands import operand_for

# Range of the indices; the ranks use the minimum of all.
_BEYOND, _ANYWHERE, _IN_WINDOWS = 0.0, 1.0, 2.0


def max_unpool(
    dims: int,
    function: Callable[..., Tensor],
    input: ShardedTensor,
    indices: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    output_size: Sequence[int] | None = None,
) -> ShardedTensor:
    """Places each value at its index in the flattened spatial dims of a result of zeros.

    If several values have the same index, the last one in the order of the input is kept, on every
    device (torch on a GPU keeps any of them). All of them get the gradient of that position, as in
    torch. Values come from the neighbors whose windows reach a block, or from all ranks if any
    index is outside its value's window.

    Raises:
        UsageError: the indices have another shape or dtype, or are out of range; or torch refuses
            `output_size`.
    """
    if input.dim() == dims + 1:
        batched = indices.unsqueeze(0)
        tail = (kernel_size, stride, padding, output_size)
        return max_unpool(dims, function, input.unsqueeze(0), batched, *tail).squeeze(0)  # type: ignore[arg-type,return-value]
    if input.dim() != dims + 2:
        raise refusal(function, (input,), {}, f"expected [N, C] and {dims} spatial dims")
    if indices.shape != input.shape or indices.dtype != torch.int64:
        raise UsageError(
            f"indices {tuple(indices.shape)} of {indices.dtype} for values {tuple(input.shape)}: "
            "max_unpool needs an int64 index for every value"
        )
    kernel = as_tuple(kernel_size, dims)
    steps = kernel if stride is None else as_tuple(stride, dims)
    pads = as_tuple(padding, dims)
    window = Window(kernel, steps, (1,) * dims, symmetric(pads))
    layout = _result_layout(input.layout, window, _extents(input, window, output_size))
    values = local_of(input)
    if torch.is_autocast_enabled(values.device.type) and values.dtype.itemsize == 2:
        one = (1,) * values.dim()
        values = values.to(result_dtype(function, (one, values), (one, indices), arguments=(1,)))
    places = operand_for(indices, input.layout, input.shape)
    reach = torch.tensor([_reach(places, input.layout, layout, window)])
    timers = input.mesh.session.timers
    with timers.measure("statistics"):
        input.mesh.sample.all_reduce(reach, "min")
    if reach == _BEYOND:
        raise UsageError(f"indices beyond the result of max_unpool, {layout.shape}")
    exchanger = _exchanger(input.layout, layout, window, everywhere=bool(reach == _ANYWHERE))
    values = average_grad(values, input.mesh, input.layout.unused_axes)
    values = gather_box(values, exchanger, input.mesh)
    gathered = places.new_empty(exchanger.slots[0].shape)
    with timers.measure("halo"):
        exchanger.gather(places, [gathered])
    return wrap(_placed(values, gathered, layout), layout, input)


def _extents(x: ShardedTensor, window: Window, given: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the extents of the result; given ones must be possible inputs of the pooling."""
    usual = tuple(
        (n - 1) * s + k - 2 * p
        for n, k, s, (p, _) in zip(
            x.shape[2:], window.kernel, window.stride, window.padding, strict=True
        )
    )
    if given is None:
        return usual
    extents = tuple(given)[-len(usual) :]
    steps = window.stride
    if len(given) not in (len(usual), len(usual) + 2) or any(
        abs(n - m) >= s for n, m, s in zip(extents, usual, steps, strict=True)
    ):
        raise UsageError(
            f"output_size {tuple(given)}: max_unpool can give extents less than the stride "
            f"{steps} away from {usual}"
        )
    return extents


def _result_layout(layout: Layout, window: Window, extents: Sequence[int]) -> Layout:
    """Returns the layout whose blocks begin at the windows of the values' blocks."""
    changes = {}
    for dim, (extent, step) in enumerate(zip(extents, window.stride, strict=True), start=2):
        split = layout.splits[dim]
        if split is not None:
            points = [min(point * step, extent) for point in split.partition.points]
            changes[dim] = Split(split.axes, Partition([*points[:-1], extent]))
    return layout.replace((*layout.shape[:2], *extents), changes)


def _coordinates(flat: Tensor, extents: Sequence[int]) -> list[Tensor]:
    """Returns coordinates of flat indices; out-of-range indices exceed the first extent."""
    found = []
    for extent in reversed(extents[1:]):
        found.append(flat % extent)
        flat = flat.div(extent, rounding_mode="floor")
    return [flat, *reversed(found)]


def _reach(places: Tensor, source: Layout, target: Layout, window: Window) -> float:
    """Returns whether all of this rank's indices are in their values' windows, or in range."""
    in_windows = torch.ones((), dtype=torch.bool, device=places.device)
    inside = torch.ones_like(in_windows)
    for dim, at in enumerate(_coordinates(places, target.shape[2:])):
        inside = inside & ((at >= 0) & (at < target.shape[dim + 2])).all()
        lo, hi = source.box.lo[dim + 2], source.box.hi[dim + 2]
        outputs = torch.arange(lo, hi, device=places.device)
        start = outputs * window.stride[dim] - window.padding[dim][0]
        start = start.view(-1, *(1,) * (places.dim() - dim - 3))
        in_windows = in_windows & ((at >= start) & (at < start + window.kernel[dim])).all()
    if not inside:
        return _BEYOND
    return _IN_WINDOWS if in_windows else _ANYWHERE


def _exchanger(source: Layout, target: Layout, window: Window, *, everywhere: bool) -> Exchanger:
    """Returns the exchanger of the values that may belong to each rank's block of the result."""
    mesh = source.mesh
    key = ("unpool", source, target, window, everywhere)

    def make() -> Exchanger:
        needed = [[_sources(own, source, window, everywhere)] for own in target.boxes]
        return Exchanger(mesh.sample, source.boxes, needed, mesh.session.timers)

    return mesh.session.plan(key, make)


def _sources(own: Box, source: Layout, window: Window, everywhere: bool) -> Box:
    lo, hi = list(own.lo), list(own.hi)
    for dim in range(2, len(lo)):
        lo[dim], hi[dim] = 0, source.shape[dim]
        if own.empty:
            hi[dim] = 0
        elif not everywhere:
            first, end = window.footprint(dim - 2).feeds(own.lo[dim], own.hi[dim])
            lo[dim] = min(max(first, 0), hi[dim])
            hi[dim] = min(max(end, lo[dim]), hi[dim])
    return Box(lo, hi)


def _placed(values: Tensor, places: Tensor, layout: Layout) -> Tensor:
    """Computes this rank's block; other ranks' values go to an extra position that is cut off."""
    box = layout.box
    count = box.volume // max(1, box.shape[0] * box.shape[1])
    inside = torch.ones_like(places, dtype=torch.bool)
    flat = torch.zeros_like(places)
    for dim, at in enumerate(_coordinates(places, layout.shape[2:]), start=2):
        inside &= (at >= box.lo[dim]) & (at < box.hi[dim])
        flat = flat * box.shape[dim] + at - box.lo[dim]
    flat = torch.where(inside, flat, count).flatten(2)
    values = values.flatten(2)
    block = values.new_zeros(*box.shape[:2], count + 1).scatter(2, flat, values)
    if values.is_cuda:
        _let_last_stay(block, flat, values)
    return block[..., :count].reshape(box.shape)


@torch.no_grad()
def _let_last_stay(block: Tensor, flat: Tensor, values: Tensor) -> None:
    """Overwrites each position of a scatter's result with the last of its values.

    A scatter on a CPU gives this result, as it writes the values in order. A GPU writes them in any
    order, so all values written to one position must be equal.

    Args:
        block: [N, C, positions], a scatter's result; its gradient stays that of all values.
        flat: [N, C, values], the position of each value.
        values: [N, C, values].
    """
    order = torch.arange(flat.shape[2], device=flat.device).expand_as(flat)
    last = torch.zeros_like(block, dtype=torch.int64).scatter_reduce_(2, flat, order, "amax")
    block.scatter_(2, flat, values.gather(2, last.gather(2, flat)))


def _register() -> None:
    for dims, function in ((1, F.max_unpool1d), (2, F.max_unpool2d), (3, F.max_unpool3d)):
        handler: Any = partial(max_unpool, dims, function)
        HANDLERS[function] = handler


_register()
