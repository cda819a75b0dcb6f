"""Computes transposed convolutions of sharded tensors, of any stride and kernel.

If a shard holds all inputs that its outputs need (kernel = stride), nothing is exchanged. If the
blocks are aligned, the contributions of neighbors' slabs are added to the shard's result. Otherwise
the inputs are gathered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.backend.problem import ConvProblem
from pydist.errors import UsageError
from pydist.exchange.redistribution import BoxGatherer
from pydist.layout import Layout, Split
from pydist.ops.channels import on_plain
from pydist.ops.conv.correction import CorrectionPlan, corrected
from pydist.ops.conv.local_conv import ConvChooser, onednn_on_all
from pydist.ops.conv.local_transposed import local_transposed, transposed_by_torch
from pydist.ops.conv.split_channels import (
    layer_result,
    own_operands,
    own_weights,
    refuse_unfit,
    split_channels,
)
from pydist.ops.conv.transposed_window import Piece, TransposedWindow
from pydist.ops.windows import as_tuple
from pydist.partition import Box
from pydist.tensor import HANDLERS, ShardedTensor
from pydist.tensor.deferred import NOTHING, Deferred

_FUNCTIONS = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


def conv_transpose(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Computes a transposed convolution in 1, 2 or 3 dims; a batch dim is required.

    Each part's outputs begin at its first input × stride (`TransposedWindow.layout`).

    Args:
        dims: number of spatial dims.
        input: [N, Ci, ...], sharded or plain.
        weight: [Ci, Co / groups, ...].
        bias: [Co] or `None`.
        stride: one number, or one per spatial dim, in elements; so are those below.
        padding: outputs to leave out, before and after.
        output_padding: outputs to add at the end.
        groups: of the channels.
        dilation: distance of the kernel's taps.

    Raises:
        UsageError: the channels, the groups or the paddings do not fit.
    """
    function = _FUNCTIONS[dims]
    if not isinstance(input, ShardedTensor):
        options = stride, padding, output_padding, groups, dilation
        return on_plain(function, partial(conv_transpose, dims), input, weight, bias, *options)
    refuse_unfit(function, dims, input, weight)
    layout = input.layout
    window = TransposedWindow(
        tuple(weight.shape[2:]),
        *(as_tuple(each, dims) for each in (stride, padding, output_padding, dilation)),
    )
    _check(layout, window, tuple(weight.shape), groups)
    of_all = tuple(weight.shape)
    channels = of_all[1] * groups
    split = split_channels(
        function, input, weight, groups, lambda: _out(layout, window, channels, None).shape[2:],
        is_transposed=True,
    )  # fmt: skip
    input, layout = split.input, split.input.layout
    out = _out(layout, window, channels, split.outputs)
    local, weight, bias = own_operands(
        function, split, weight, bias, out, groups, is_transposed=True
    )
    key = ("conv_transpose", layout, out, window, of_all, groups, local.dtype, local.device)
    plan = layout.mesh.session.plan(
        key, lambda: _TransposedPlan(layout, window, of_all, groups, local, out)
    )
    return layer_result(partial(plan.run, local, weight), bias, split, out)


def _check(layout: Layout, window: TransposedWindow, weight: tuple[int, ...], groups: int) -> None:
    if len(weight) != len(layout.shape) or weight[0] != layout.shape[1] or weight[0] % groups:
        raise UsageError(
            f"transposed convolution of {layout.shape} in {groups} groups with a weight {weight}: "
            "expected [input channels, output channels / groups, *kernel]"
        )
    if min(*window.padding, *window.output_padding) < 0:
        raise UsageError(
            f"negative padding is not supported: {window.padding}, at the end of the output "
            f"{window.output_padding}"
        )
    bounds = (max(s, d) for s, d in zip(window.stride, window.dilation, strict=True))
    if any(extra >= most for extra, most in zip(window.output_padding, bounds, strict=True)):
        raise UsageError(
            f"output padding {window.output_padding} must be smaller than either the stride "
            f"{window.stride} or the dilation {window.dilation}"
        )


def _out(layout: Layout, window: TransposedWindow, channels: int, split: Split | None) -> Layout:
    key = ("layout of transposed convolution", layout, window, channels, split)
    return layout.mesh.session.plan(key, lambda: window.layout(layout, channels, split))


class _TransposedPlan:
    """Plan that runs one transposed convolution: on the shard, by correction, or by gathering."""

    def __init__(
        self,
        layout: Layout,
        window: TransposedWindow,
        weight: tuple[int, ...],
        groups: int,
        local: Tensor,
        out: Layout,
    ) -> None:
        self._layout, self._window, mesh = layout, window, layout.mesh
        self._out = out
        own, outs = layout.boxes, out.boxes
        weights = own_weights(layout, out, weight, groups, is_transposed=True)
        pairs = list(zip(own, outs, strict=True))
        self._needed = [window.needs(out, box, layout.shape[2:]) for box, out in pairs]
        needs = zip(own, self._needed, strict=True)
        alone = all(need.empty or box.contains(need) for box, need in needs)
        has_slabs = len(window.kernel) > 1  # the kernels of slabs are for volumes and images
        corrects = not alone and has_slabs and all(window.lines_up(*pair) for pair in pairs)
        self._gathers = not alone and not corrects
        sources = self._needed if self._gathers else own
        calls = [window.pieces(*pair) for pair in zip(sources, outs, strict=True)]
        has_onednn = onednn_on_all(local, mesh)
        problems = [
            _problem(window, *of_rank, local, source, box, pieces, has_onednn)
            for of_rank, source, box, pieces in zip(weights, sources, outs, calls, strict=True)
        ]
        self._pieces = calls[mesh.sample_index]
        self._chooser = ConvChooser(problems, mesh)
        self._correction = None
        if corrects:
            adjoint = window.plan_adjoint(layout, out)
            self._correction = CorrectionPlan(
                adjoint,
                weights,
                self._chooser,
                partial(self._recomputed, weights[mesh.sample_index][1]),
                is_adjoint=True,
            )

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Deferred]:
        """Returns this rank's part of the result, and its state, which may hold a deferred bias."""
        layout = self._layout
        if self._correction is not None:
            return corrected(x, weight, bias, self._correction)
        if self._gathers:
            x = self._gatherer(x, self._chooser.kernels_ahead(x, weight).channels_last)
        out = self._out.box
        starts, extents = [piece.front for piece in self._pieces], list(out.shape[2:])
        if out.empty:
            x, starts, extents = _one_input(x), [0] * len(extents), [1] * len(extents)
        y = local_transposed(x, weight, bias, self._chooser, layout.mesh, starts, extents)
        # Not a view: an in-place op on a view records other nodes than on the other ranks.
        return y[:0].reshape(out.shape).clone() if out.empty else y, NOTHING

    @cached_property
    def _gatherer(self) -> BoxGatherer:
        return BoxGatherer(self._layout, self._needed)

    def _recomputed(self, groups: int, x: Tensor, weight: Tensor) -> Tensor:
        """Computes this rank's outputs without bias, from gathered inputs."""
        window, out = self._window, self._out.box
        source = self._needed[self._layout.mesh.sample_index]
        starts = [
            first + p - lo * s
            for first, p, lo, s in zip(
                out.lo[2:], window.padding, source.lo[2:], window.stride, strict=True
            )
        ]
        attributes = window.stride, window.dilation, groups, starts, out.shape[2:]
        return transposed_by_torch(self._gatherer(x), weight, *attributes)


def _problem(
    window: TransposedWindow,
    weight: tuple[int, ...],
    groups: int,
    local: Tensor,
    source: Box,
    out: Box,
    pieces: Sequence[Piece],
    has_onednn: bool,
) -> ConvProblem:
    """Describes the convolution whose adjoint is a rank's library call; see `_one_input`."""
    extents = [piece.extent for piece in pieces]
    padding = [piece.padding for piece in pieces]
    if out.empty:
        extents, padding = list(window.spans), [0] * len(pieces)
    stride, dilation = window.stride, window.dilation
    more: tuple[int, ...] = ()
    if len(pieces) == 1:
        # oneDNN has no 1D form, and torch's own kernel may be wrong.
        more, stride, padding, dilation = (1,), (1, *stride), [0, *padding], (1, *dilation)
    return ConvProblem(
        (max(1, source.shape[0]), weight[1] * groups, *more, *extents),
        (*weight[:2], *more, *weight[2:]),
        stride, tuple(padding), dilation, groups, local.dtype, local.device.type, has_onednn,
    )  # fmt: skip


def _one_input(x: Tensor) -> Tensor:
    """Returns one input voxel, so that a rank without outputs runs the same nodes as others.

    Otherwise its hooks would not fire in backward, and the job would hang.
    """
    for dim in range(2, x.dim()):
        x = x.narrow(dim, 0, min(1, x.shape[dim]))
    return F.pad(x, [n for extent in reversed(x.shape) for n in (0, int(extent == 0))])


def _register() -> None:
    for dims, function in _FUNCTIONS.items():
        handler: Any = partial(conv_transpose, dims)
        HANDLERS[function] = handler


_register()
