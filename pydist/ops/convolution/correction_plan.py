"""Plan of a convolution by correction: which outputs each slab of the halo reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from pydist.ops.convolution.local_conv import ConvChooser
from pydist.ops.convolution.slab_kernels import SlabChooser
from pydist.ops.windows import Window, WindowPlan
from pydist.partition import Box, subtract


class Piece(NamedTuple):
    """A part of the outputs that a slab reaches.

    Attributes:
        slab: its number in the exchange.
        box: where, in global output coordinates.
        is_last: whether no later slab adds to it.
    """

    slab: int
    box: Box
    is_last: bool


class BoundaryPieces:
    """In which pieces the slabs reach this rank's outputs, so that each has one last piece.

    Args:
        window: of the convolution.
        slabs: boxes [N, C, ...] of the inputs that this rank receives.
        out: box of this rank's outputs.
    """

    def __init__(self, window: Window, slabs: list[Box], out: Box) -> None:
        self._window, self._slabs, self._out = window, slabs, out

    @cached_property
    def pieces(self) -> list[Piece] | None:
        """In the order in which they are added; `None` where a slab's outputs are no box."""
        reached = [self._reached(slab) for slab in self._slabs]
        found: list[Piece] = []
        for slab, box in enumerate(reached):
            if box is None:
                return None
            last = _without(box, [b for b in reached[slab + 1 :] if b is not None])
            found += [Piece(slab, part, False) for part in _without(box, last)]
            found += [Piece(slab, part, True) for part in last]
        return found

    @cached_property
    def interior(self) -> list[Box]:
        """The outputs that no slab reaches."""
        return _without(self._out, [piece.box for piece in self.pieces or []])

    def _reached(self, slab: Box) -> Box | None:
        lo, hi = list(self._out.lo), list(self._out.hi)
        for dim in range(2, len(lo)):
            hull = range(lo[dim], hi[dim])
            hit = [o for o in hull if self._reads(dim, o, slab)]
            # Strides or dilation above the kernel's taps leave holes.
            if hit and len(hit) != hit[-1] - hit[0] + 1:
                return None
            lo[dim], hi[dim] = (hit[0], hit[-1] + 1) if hit else (lo[dim], lo[dim])
        return Box(lo, hi)

    def _reads(self, dim: int, output: int, slab: Box) -> bool:
        window, spatial = self._window, dim - 2
        first = output * window.stride[spatial] - window.padding[spatial][0]
        taps = range(window.kernel[spatial])
        return any(
            slab.lo[dim] <= first + k * window.dilation[spatial] < slab.hi[dim] for k in taps
        )


def _without(box: Box, others: list[Box]) -> list[Box]:
    parts = [box]
    for other in others:
        parts = [rest for part in parts for rest in subtract(part, other) if not rest.empty]
    return [part for part in parts if not part.empty]


class CorrectionPlan:
    """What a convolution by correction needs to know: who computes what, and how.

    Args:
        plan: who computes which outputs, of the convolution.
        groups: of channels.
        chooser: of the main convolution, on this rank's shard.
        recompute: the same of a shard and a weight by the general path, without bias, for
            gradients of gradients.
        is_adjoint: whether the convolution is run backwards, as a transposed one.

    Attributes:
        inputs: box of this rank's shard of what is mapped.
        outputs: of the result.
        roles: what the slabs' kernels do forward, and for dL/dx.
    """

    def __init__(
        self,
        plan: WindowPlan,
        groups: int,
        chooser: ConvChooser,
        recompute: Callable[[Tensor, Tensor], Tensor],
        is_adjoint: bool = False,
    ) -> None:
        self.plan, self.chooser, self.recompute = plan, chooser, recompute
        self.is_adjoint = is_adjoint
        self.mesh = plan.layout.mesh
        boxes = plan.layout.box, plan.out.box
        self.inputs, self.outputs = reversed(boxes) if is_adjoint else boxes
        self.roles = ("dgrad", "forward") if is_adjoint else ("forward", "dgrad")
        padding = tuple(before for before, _ in plan.window.padding)
        self.slab_chooser = SlabChooser(plan, padding, groups, is_adjoint)

    @cached_property
    def boundary(self) -> BoundaryPieces | None:
        """The pieces of the outputs that slabs reach; `None` if the convolution is transposed."""
        if self.is_adjoint:
            return None
        slabs = self.plan.halos[self.mesh.sample_index]
        return BoundaryPieces(self.plan.window, slabs, self.outputs)


def lines_up(plan: WindowPlan) -> bool:
    """Whether a convolution of its shard gives every rank its outputs, each at its place."""
    return len(plan.window.kernel) == 3 and all(
        _lines_up(plan.window, own, out)
        for own, out in zip(plan.layout.boxes, plan.out.boxes, strict=True)
    )


def _lines_up(window: Window, own: Box, out: Box) -> bool:
    if own.empty or out.empty:
        return False
    for dim, (before, after) in enumerate(window.padding):
        stride = window.stride[dim]
        reach = window.dilation[dim] * (window.kernel[dim] - 1) + 1
        lo, extent = own.lo[dim + 2], own.shape[dim + 2]
        computed = (extent + 2 * before - reach) // stride + 1
        if before != after or lo % stride or lo // stride != out.lo[dim + 2]:
            return False
        if computed != out.shape[dim + 2]:
            return False
    return True
