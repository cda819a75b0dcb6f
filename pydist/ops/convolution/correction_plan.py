"""Plan of a convolution by correction, and the test whether it is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pydist.ops.convolution.local_conv import ConvChooser
from pydist.ops.convolution.slab_kernels import SlabChooser
from pydist.ops.windows import Window, WindowPlan
from pydist.partition import Box


class CorrectionPlan:
    """Plan that holds the boxes and kernels of a convolution by correction.

    Args:
        plan: the window plan of the convolution.
        weights: shape of each rank's weight, and its number of groups.
        chooser: of the main convolution, on this rank's shard.
        recompute: computes the convolution of a shard and a weight by the general path, without
            bias, for double backward.
        is_adjoint: whether the convolution runs backward, as a transposed one.

    Attributes:
        inputs: box of this rank's shard of the input.
        outputs: box of this rank's shard of the result.
        roles: roles of the slab kernels in forward, and for dL/dx.
    """

    def __init__(
        self,
        plan: WindowPlan,
        weights: Sequence[tuple[tuple[int, ...], int]],
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
        self.slab_chooser = SlabChooser(plan, padding, weights, is_adjoint)


def lines_up(plan: WindowPlan) -> bool:
    """Returns whether a convolution of the shard gives exactly the rank's outputs, on all ranks."""
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
