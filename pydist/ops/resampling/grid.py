"""Samples a tensor at positions that a grid gives, as registration networks do.

Which inputs an output reads depends on the grid's values. Each rank finds the box that its part of
the grid reads, the ranks tell each other their boxes, and each gathers its box: with bounded
displacements a halo, in general all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.exchange.adjoints import average_grad, gather_box
from pydist.exchange.exchanger import Exchanger
from pydist.layout import Layout, Split
from pydist.ops.empty import with_elements, without_added
from pydist.ops.transposition import scaled_layout
from pydist.partition import Box
from pydist.tensor import ShardedTensor, implements, local_of, source_among, wrap
from pydist.tensor.operands import operand_in

_MODES = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")
_REACH = {"bilinear": 1, "nearest": 1, "bicubic": 2}
"""Inputs on each side of a position that an output reads."""
_STEPS = 8
"""Boxes begin and end at multiples of this fraction of an extent, so that few plans are made."""
_PLANS = 16
"""Plans that are kept, of all calls of a mesh."""


@implements(F.grid_sample)
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> ShardedTensor:
    """Samples the input at the positions of a grid; the result is split like the grid."""
    if input.dim() not in (4, 5) or grid.dim() != input.dim():
        raise RuntimeError(
            f"grid_sample: input of shape {list(input.shape)} and grid of {list(grid.shape)}: "
            "both with 4 or both with 5 dims are possible"
        )
    if grid.shape[0] != input.shape[0] or grid.shape[-1] != input.dim() - 2:
        raise RuntimeError(
            f"grid_sample: input of shape {list(input.shape)} and grid of {list(grid.shape)}: the "
            f"same batch size, and {input.dim() - 2} numbers at each position, are expected"
        )
    if 0 in input.shape[2:]:
        raise RuntimeError(
            f"grid_sample: input of shape {list(input.shape)}: there is no element to sample"
        )
    for name, given, possible in (
        ("mode", mode, _MODES),
        ("padding_mode", padding_mode, _PADDINGS),
    ):
        if given not in possible:
            raise ValueError(f"grid_sample: {name}={given!r}; possible are {', '.join(possible)}")
    aligned = bool(align_corners)
    like = source_among((input, grid))
    out = _layout_of_result(input, grid, like)
    in_space = (out.splits[0], *out.splits[2:], None)
    positions = operand_in(grid, Layout(out.mesh, tuple(grid.shape), in_space), out)
    if isinstance(input, ShardedTensor):
        needed = _needed(positions.detach(), input.shape[2:], mode, padding_mode, aligned)
        box = _gathered(input, needed, out)
        positions = _in_box(positions, input.shape[2:], needed, mode, padding_mode, aligned)
    else:
        splits = (*out.splits[:2], *(None for _ in input.shape[2:]))
        box = operand_in(input, Layout(out.mesh, tuple(input.shape), splits), out)
    box, positions = with_elements(box), with_elements(positions)
    local = F.grid_sample(box, positions, mode, padding_mode, aligned)
    return wrap(without_added(local, out.local_shape), out, like)


@implements(torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d)
def grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> ShardedTensor:
    """Computes samples as `grid_sample` does, with modes by number."""
    mode, padding = _MODES[interpolation_mode], _PADDINGS[padding_mode]
    return grid_sample(input, grid, mode, padding, align_corners)


@implements(F.affine_grid)
def affine_grid(
    theta: ShardedTensor, size: Sequence[int], align_corners: bool | None = None
) -> ShardedTensor:
    """Makes the grid of affine maps; each rank makes the grids of its samples in full."""
    dims = len(size) - 2
    expected = (size[0], dims, dims + 1)
    if tuple(theta.shape) != expected:
        kind = RuntimeError if theta.shape[1:] == expected[1:] else ValueError  # as torch
        raise kind(
            f"affine_grid: theta of shape {list(theta.shape)} for a size of {list(size)}; "
            f"{list(expected)} is expected"
        )
    mesh, batch = theta.mesh, theta.layout.splits[0]
    shape = (size[0], *size[2:], dims)
    out = Layout(mesh, shape, (batch, *[None] * (len(shape) - 1)))
    whole = with_elements(operand_in(theta, Layout(mesh, theta.shape, (batch, None, None)), out))
    local = F.affine_grid(whole, [whole.shape[0], *size[1:]], bool(align_corners))
    return wrap(without_added(local, out.local_shape), out, theta)


def _layout_of_result(input: Tensor, grid: Tensor, like: ShardedTensor) -> Layout:
    """Returns the result's layout: space as in the grid, or else in the input, the rest if free."""
    of_grid = grid.layout.splits if isinstance(grid, ShardedTensor) else (None,) * grid.dim()
    of_input: Sequence[Split | None] = (None,) * input.dim()
    space = of_grid[1:-1]
    if isinstance(input, ShardedTensor):
        of_input = input.layout.splits
        if not any(space):
            shape = (*input.shape[:2], *grid.shape[1:-1])
            space = scaled_layout(input.layout, shape).splits[2:]
    used = {axis for split in space if split for axis in split.axes}

    def free(split: Split | None) -> Split | None:
        if split is None or used & set(split.axes):
            return None
        used.update(split.axes)
        return split

    batch = free(of_grid[0]) or free(of_input[0])
    splits = (batch, free(of_input[1]), *space)
    return Layout(like.mesh, (grid.shape[0], input.shape[1], *grid.shape[1:-1]), splits)


def _needed(
    grid: Tensor, extents: Sequence[int], mode: str, padding: str, aligned: bool
) -> list[tuple[int, int]]:
    """Returns the interval of each spatial dim that this rank's part of the grid reads.

    It is one element longer than necessary on each side, as a position is rounded differently in
    the box.
    """
    found = []
    for d, extent in enumerate(extents):
        values = grid[..., len(extents) - 1 - d]  # the last dim comes first
        if not values.numel():
            found.append((0, min(2, extent)))
            continue
        low, high = (float(end) for end in torch.aminmax(values))
        ends = [((v + 1) * (extent - aligned) - (not aligned)) / 2 for v in (low, high)]
        if grid.dtype.itemsize < 4 or not all(map(math.isfinite, ends)):
            found.append((0, extent))
            continue
        step = max(1, extent // _STEPS)
        lo = (math.floor(ends[0]) - _REACH[mode]) // step * step
        hi = -(-(math.floor(ends[1]) + _REACH[mode] + 2) // step) * step
        if padding == "reflection" and (lo < 0 or hi > extent):
            lo, hi = 0, extent
        lo, hi = max(0, min(lo, extent - 2)), min(extent, max(hi, 2))
        found.append((lo, hi))
    return found


class _LatestPlans:
    """Plans of the boxes that grids have read lately: the same ones on all ranks, in one order.

    Boxes follow from values, so a session that kept all plans would grow with each step.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Exchanger] = OrderedDict()

    def plan(self, key: Hashable, make: Callable[[], Exchanger]) -> Exchanger:
        """Returns the plan with a key, which becomes the latest one; creates it if needed."""
        found = self._plans.pop(key, None) or make()
        self._plans[key] = found
        if len(self._plans) > _PLANS:
            self._plans.popitem(last=False)
        return found


def _gathered(x: ShardedTensor, needed: Sequence[tuple[int, int]], out: Layout) -> Tensor:
    """Gathers this rank's box; the channels and samples are those of its part of the result."""
    mesh, layout = x.mesh, x.layout
    with mesh.session.timers.measure("halo"):
        intervals = mesh.sample.all_gather(torch.tensor(needed, device="cpu")).tolist()
    boxes = [
        Box([*own.lo[:2], *(lo for lo, _ in of_rank)], [*own.hi[:2], *(hi for _, hi in of_rank)])
        for own, of_rank in zip(out.boxes, intervals, strict=True)
    ]

    def make() -> Exchanger:
        return Exchanger(mesh.sample, layout.boxes, [[box] for box in boxes], mesh.session.timers)

    key = layout, tuple((tuple(b.lo), tuple(b.hi)) for b in boxes)
    exchanger = mesh.session.service(_LatestPlans, _LatestPlans).plan(key, make)
    held = average_grad(local_of(x), mesh, layout.unused_axes)
    return gather_box(held, exchanger, mesh, weight=layout.replicas / out.replicas)


def _in_box(
    grid: Tensor,
    extents: Sequence[int],
    needed: Sequence[tuple[int, int]],
    mode: str,
    padding: str,
    aligned: bool,
) -> Tensor:
    """Returns the positions relative to the box, from -1 to 1 as torch needs them.

    Bilinear samples have a kink at each input, and halfway between two inputs, as in a grid of half
    the resolution, torch takes the nearest one with the even index. So a position has the cell, or
    the nearest input, that torch finds for it in the volume, however it is rounded in the box.
    """
    partial = [box != (0, n) for n, box in zip(extents, needed, strict=True)][::-1]
    if not any(partial):
        return grid
    # The last dim comes first, as in the grid. A dim with its full extent stays as it is.
    half = 0 if aligned else 1  # twice the distance of the first input from -1
    wholes = [extent - aligned for extent in reversed(extents)]
    parts = [hi - lo - aligned for lo, hi in reversed(needed)]
    starts = [lo for lo, _ in reversed(needed)]
    scales = [w / p if cut else 1.0 for cut, w, p in zip(partial, wholes, parts, strict=True)]
    shifts = [
        (w - 2 * lo) / p - 1 if cut else 0.0
        for cut, w, p, lo in zip(partial, wholes, parts, starts, strict=True)
    ]
    found = grid * grid.new_tensor(scales) + grid.new_tensor(shifts)
    if mode == "bicubic":
        return found
    with torch.no_grad():
        start, part = grid.new_tensor(starts), grid.new_tensor(parts)
        index = ((grid + 1) * grid.new_tensor(wholes) - half) / 2  # as torch rounds it
        if mode == "nearest":
            index = index.round() - start
        else:
            cell = index.floor()
            if padding == "border":  # the first input belongs to the border
                cell = torch.where(index <= 0, -1, cell)
            cell -= start
            margin = 4 * torch.finfo(grid.dtype).eps * part  # of rounding in the box
            index = torch.clamp(index - start, cell + margin, cell + 1 - margin)
        exact = (2 * index + half) / part - 1
        change = torch.where(torch.tensor(partial, device=grid.device), exact - found, 0)
    return found + change
