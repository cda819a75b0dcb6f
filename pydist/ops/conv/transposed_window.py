"""Computes the geometry of transposed convolution: each rank's outputs, and the inputs they need.

Input i contributes to the outputs i * stride - padding + k * dilation, 0 <= k < kernel. So the
adjoint is the convolution with the same window. The forward and backward exchanges are that
convolution's backward and forward exchanges (`WindowPlan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pydist.errors import UsageError
from pydist.layout import Layout, Split
from pydist.ops.windows import Window, WindowPlan
from pydist.partition import Box, Partition


class Piece(NamedTuple):
    """One dim of a library call that computes wanted outputs from an interval of inputs.

    The call has an output padding of at most `stride` - 1.
    """

    padding: int
    """Number of outputs that the call omits before and after."""
    extent: int
    """Number of outputs of the call."""
    front: int
    """Number of outputs of the call before the wanted ones."""


@dataclass(frozen=True)
class TransposedWindow:
    """Window that a transposed convolution applies; each attribute has a number per spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Number of outputs from the first to the last that an input reaches, inclusive."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @cached_property
    def adjoint(self) -> Window:
        """Window that the adjoint convolution applies, with less padding by the output padding."""
        pads = zip(self.padding, self.output_padding, strict=True)
        padding = tuple((p, p - extra) for p, extra in pads)
        return Window(self.kernel, self.stride, self.dilation, padding)

    def layout(self, source: Layout, channels: int, split: Split | None = None) -> Layout:
        """Returns the layout of the outputs, whose channels have a split.

        A part's outputs begin at its first input × stride, shifted so that it needs the fewest
        inputs of both neighbors: none if the kernel is no larger than the stride. A convolution
        with the same window restores the inputs' partition, so that a decoder's partition matches
        its encoder's skip connection.

        Args:
            source: layout of the inputs.
            channels: number of output channels.
            split: of the channels; `None` if each rank has all.

        Raises:
            UsageError: there are no outputs.
        """
        extents = [
            (n - 1) * s - 2 * p + span + extra
            for n, s, p, span, extra in zip(
                source.shape[2:], self.stride, self.padding, self.spans, self.output_padding,
                strict=True,
            )
        ]  # fmt: skip
        if min(extents) < 1:
            raise UsageError(
                f"transposed convolution of extents {source.shape[2:]} with kernel {self.kernel}, "
                f"stride {self.stride} and padding {self.padding} gives extents {tuple(extents)}"
            )
        splits = [source.splits[0], split, *source.splits[2:]]
        for dim, extent in enumerate(extents, start=2):
            split = source.splits[dim]
            if split is not None:
                points = self._points(dim - 2, split.partition, extent)
                splits[dim] = Split(split.axes, Partition(points))
        return Layout(source.mesh, (source.shape[0], channels, *extents), splits)

    def _points(self, dim: int, inputs: Partition, extent: int) -> list[int]:
        stride, padding = self.stride[dim], self.padding[dim]
        overlap = -(-max(0, self.spans[dim] - stride) // 2)
        found = []
        for point in inputs.points:
            inner = min(max(0, point * stride - padding + overlap), extent)
            found.append(0 if point == 0 else extent if point == inputs.extent else inner)
        return found

    def plan_adjoint(self, source: Layout, out: Layout) -> WindowPlan:
        """Plans the adjoint convolution, between the same two layouts."""
        return WindowPlan(out, self.adjoint, source.shape[1], out=source)

    def needs(self, out: Box, own: Box, extents: Sequence[int]) -> Box:
        """Returns the box of inputs that a library call needs for the outputs `out`.

        Args:
            out: the outputs; if empty, no inputs are needed.
            own: the inputs of the rank that computes them.
            extents: of the inputs; inputs beyond them are zeros.
        """
        lo, hi = list(own.lo), list(own.hi)
        for dim, extent in enumerate(extents):
            first, last = self._needs(dim, out.lo[dim + 2], out.hi[dim + 2], extent)
            lo[dim + 2], hi[dim + 2] = first, first if out.empty else last
        return Box(lo, hi)

    def _needs(self, dim: int, out_lo: int, out_hi: int, extent: int) -> tuple[int, int]:
        stride, span = self.stride[dim], self.spans[dim]
        out_lo, out_hi = out_lo + self.padding[dim], out_hi + self.padding[dim]
        # If the kernels leave gaps, the call must start at an input before the gap, and end so late
        # that less than a stride is missing at the end.
        lo = max(0, (out_lo - span) // stride + 1)
        lo = min(lo, out_lo // stride, extent - 1)
        hi = min(-(-out_hi // stride), extent)
        return lo, max(hi, -(-(out_hi + 1 - span) // stride), lo + 1)

    def pieces(self, source: Box, out: Box) -> list[Piece]:
        """Returns the library call on the inputs `source`, which contain those needed for `out`."""
        return [
            self._piece(dim, source.lo[dim + 2], source.hi[dim + 2], *ends)
            for dim, ends in enumerate(zip(out.lo[2:], out.hi[2:], strict=True))
        ]

    def _piece(self, dim: int, lo: int, hi: int, out_lo: int, out_hi: int) -> Piece:
        before, after = self._surplus(dim, lo, hi, out_lo, out_hi)
        if 0 <= before - after < self.stride[dim]:
            return Piece(before, out_hi - out_lo, 0)
        padding = min(before, max(0, after))
        front = before - padding
        return Piece(padding, front + out_hi - out_lo + max(0, after - padding), front)

    def _surplus(self, dim: int, lo: int, hi: int, out_lo: int, out_hi: int) -> tuple[int, int]:
        """Returns how many outputs an interval of inputs reaches before and after the wanted."""
        stride, padding = self.stride[dim], self.padding[dim]
        before = out_lo + padding - lo * stride
        return before, (hi - 1) * stride + self.spans[dim] - padding - out_hi

    def lines_up(self, own: Box, out: Box) -> bool:
        """Returns whether one call on the shard gives exactly the outputs of the rank."""
        if own.empty or out.empty:
            return False
        for dim, stride in enumerate(self.stride):
            ends = own.lo[dim + 2], own.hi[dim + 2], out.lo[dim + 2], out.hi[dim + 2]
            before, after = self._surplus(dim, *ends)
            if before < 0 or not 0 <= before - after < stride:
                return False
        return True
