"""Sizes of the blocks that the rank with most has of a trace's tensors, on one mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydist.backend.problem import ConvProblem
from pydist.grid import CHANNEL_AXIS, Grid, axes_by_dim
from pydist.plan.estimate import StepModel
from pydist.plan.trace import SAMPLES, TracedCall


class Blocks:
    """Blocks that a rank has of a trace's tensors, on one mesh.

    Args:
        model: of the step.
        grid: the mesh.

    Attributes:
        axes: of the mesh, along which the input's spatial dims are cut.
        cuts: of each spatial dim.
        channel_axes: along which channels are cut: the channel axis, or where there is none the
            spatial axes, for layers with thin blocks.
        channel: parts of the channels.
        samples: of a pass of a sample group, relative to those of the trace.
        assumed: the same as ranks assume in choices of layouts: one where there are several groups.
        is_cut: of each tensor, whether its spatial dims are cut.
        has_part: of each tensor, whether a rank has a part of its channels.
    """

    def __init__(self, model: StepModel, grid: Grid) -> None:
        self._model, self._trace, self.grid = model, model.trace, grid
        self.axes = tuple(axes_by_dim(self._trace.dims).values())
        self.cuts = model.cuts.of([grid.size((axis,)) for axis in self.axes])
        self.has_channel_axis = grid.size((CHANNEL_AXIS,)) > 1
        self.channel_axes = (CHANNEL_AXIS,) if self.has_channel_axis else grid.split(self.axes)
        self.channel = grid.size(self.channel_axes)
        groups = grid.size(("data",))
        self.samples = math.ceil(model.training.batch / (groups * model.training.passes)) / SAMPLES
        self.assumed = 1 / SAMPLES if groups > 1 else self.samples
        count = len(self._trace.tensors)
        self.is_cut = [False] * count
        self.has_part = [False] * count
        self.is_cut[0] = grid.size(self.axes) > 1

    def share(self, number: int) -> float:
        """Returns the part of a tensor's spatial extents that a rank has at most."""
        return self.share_if_cut(number) if self.is_cut[number] else 1.0

    def share_if_cut(self, number: int) -> float:
        """Returns the same for a tensor that is cut, whether or not it is."""
        shape = self._trace.tensors[number].shape
        found = 1.0
        for dim, cut in enumerate(self.cuts, start=2):
            found *= cut.sizes[number] / max(1, shape[dim])
        return found

    def part(self, number: int) -> float:
        """Returns the part of a tensor's channels that a rank has at most."""
        shape = self._trace.tensors[number].shape
        if not self.has_part[number] or len(shape) < 2:
            return 1.0
        return math.ceil(shape[1] / self.channel) / shape[1]

    def nbytes(self, number: int) -> float:
        """Returns the bytes of a rank's block of a tensor."""
        return self.of_all_channels(number) * self.part(number)

    def of_all_channels(self, number: int) -> float:
        """Returns the bytes of a rank's block of a tensor, with all channels."""
        nbytes = self._trace.tensors[number].nbytes * self.samples * self._model.narrow
        return nbytes * self.share(number)

    def in_choices(self, nbytes: float) -> float:
        """Returns the bytes of a block as choices of layouts assume them: not in 16 bits."""
        return nbytes * self.assumed / (self.samples * self._model.narrow)

    def shape(self, number: int, *, has_part: bool) -> tuple[int, ...]:
        """Returns the shape of a rank's block of a tensor, with all or a part of its channels."""
        tensor = self._trace.tensors[number]
        shape = [round(self.samples * tensor.shape[0]), *tensor.shape[1:]]
        if has_part:
            shape[1] = math.ceil(shape[1] / self.channel)
        if self.is_cut[number]:
            shape[2:] = [cut.sizes[number] for cut in self.cuts]
        return tuple(shape)

    def is_whole_sample(self, shape: Sequence[int]) -> bool:
        """Returns whether a shape has the input's number of dims, so that it can be cut."""
        return len(shape) == self._trace.dims + 2

    def problem(self, call: TracedCall, of_input: bool, of_result: bool) -> ConvProblem | None:
        """Returns the convolution that a rank computes; `None` if the call is none.

        Args:
            call: the call.
            of_input: whether the rank reads a part of the input's channels.
            of_result: whether it computes a part of the result's channels.
        """
        if call.window is None or not call.weight:
            return None
        source = self.shape(call.inputs[0], has_part=of_input)
        out = self.shape(call.outputs[0], has_part=of_result)
        if call.kind == "transposed":
            source, out = out, source
        if len(source) < 4:
            return None
        groups = max(1, call.groups // (self.channel if of_input or of_result else 1))
        weight = (out[1], source[1] // groups, *call.weight[2:])
        window = call.window
        padding = tuple(before for before, _ in window.padding)
        return ConvProblem(
            source, weight, window.stride, padding, window.dilation, groups,
            self._model.dtype,
        )  # fmt: skip
