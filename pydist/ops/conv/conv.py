"""Convolution of sharded tensors: by correction if the blocks are aligned, else by gathering."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.backend.problem import ConvProblem
from pydist.exchange.own_slice import is_sharded_weight
from pydist.layout import Layout
from pydist.ops.channels import gathered_input, on_plain
from pydist.ops.coarsening import coarsen_if_faster, conv_workload
from pydist.ops.conv.correction import CorrectionPlan, corrected, lines_up
from pydist.ops.conv.local_conv import ConvChooser, local_conv, onednn_on_all, unpadded_conv
from pydist.ops.conv.split_channels import (
    layer_result,
    own_operands,
    own_weights,
    refuse_unfit,
    split_channels,
)
from pydist.ops.fusion.relu import ConvOutputs, deferred_bias
from pydist.ops.windows import Window, WindowPlan, as_keys, as_tuple, plan_window, symmetric
from pydist.tensor import HANDLERS, ShardedTensor

_FUNCTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


def conv(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Computes a convolution in 1, 2 or 3 dims; a batch dim is required.

    Args:
        dims: number of spatial dims.
        input: [N, Ci, ...], sharded or plain.
        weight: [Co, Ci / groups, ...].
        bias: [Co] or `None`.
        stride: one number, or one per spatial dim, in elements; so are padding and dilation.
        padding: elements of zeros before and after; or "valid" or "same".
        dilation: distance of the kernel's taps.
        groups: of the channels.

    Source: Oyama et al., hybrid-parallel training of 3D CNNs (spatial partitioning). The correction
    uses linearity: a convolution of a sum is the sum of convolutions.
    """
    function = _FUNCTIONS[dims]
    if not isinstance(input, ShardedTensor):
        options = stride, padding, dilation, groups
        return on_plain(function, partial(conv, dims), input, weight, bias, *options)
    refuse_unfit(function, dims, input, weight)
    layout, of_all = input.layout, tuple(weight.shape)
    session, sizes = layout.mesh.session, as_keys(dims, stride, padding, dilation)
    splits = groups == 1 and not is_sharded_weight(weight)
    window, layout = session.plan(
        ("window of conv", layout, of_all, sizes, splits),
        lambda: _window(layout, of_all, splits, *sizes),
    )
    if layout is not input.layout:
        input = gathered_input(input, layout)
    split = split_channels(
        function, input, weight, groups,
        lambda: plan_window(layout, window, of_all[0]).out.shape[2:], is_transposed=False,
    )  # fmt: skip
    input, layout = split.input, split.input.layout
    windows = plan_window(layout, window, of_all[0], split.outputs)
    out = windows.out
    local, weight, bias = own_operands(
        function, split, weight, bias, out, groups, is_transposed=False
    )
    key = ("conv", windows, of_all, groups, local.dtype, local.device)
    plan = session.plan(key, lambda: _ConvPlan(windows, of_all, groups, local))
    return layer_result(partial(plan.run, local, weight), bias, split, out)


def _window(
    layout: Layout,
    weight: tuple[int, ...],
    splits: bool,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
) -> tuple[Window, Layout]:
    """Returns the window of a convolution, and the input's layout in which it is fastest."""
    kernel, dims = weight[2:], len(layout.shape) - 2
    stride, dilation = as_tuple(stride, dims), as_tuple(dilation, dims)
    window = Window(kernel, stride, dilation, _padding(padding, kernel, stride, dilation))
    return window, coarsen_if_faster(layout, conv_workload(window, weight, splits=splits))


class _ConvPlan:
    """Plan that runs one convolution: on the shard, by correction, or on a gathered input."""

    def __init__(
        self, plan: WindowPlan, weight: tuple[int, ...], groups: int, local: Tensor
    ) -> None:
        layout, window = plan.layout, plan.window
        self._mesh, self._plan = layout.mesh, plan
        weights = own_weights(layout, plan.out, weight, groups, is_transposed=False)
        groups = weights[layout.mesh.sample_index][1]
        aligned = lines_up(plan)
        is_symmetric = all(before == after for before, after in window.padding)
        pads = tuple(before for before, _ in window.padding)
        in_place = aligned or (plan.is_whole and is_symmetric)
        shapes = [box.shape for box in layout.boxes] if in_place else plan.gathered_shapes
        stride, dilation = window.stride, window.dilation
        used = pads if in_place else (0,) * len(pads)
        if len(pads) == 1:
            # `local_conv` adds a dim: oneDNN has no 1D form, and torch's own kernel may be wrong.
            shapes = [(*shape[:2], 1, *shape[2:]) for shape in shapes]
            weights = [((*shape[:2], 1, *shape[2:]), n) for shape, n in weights]
            stride, used, dilation = (1, *stride), (0, *used), (1, *dilation)
        has_onednn = onednn_on_all(local, self._mesh)
        problems = [
            ConvProblem(
                tuple(shape), own, stride, used, dilation, n, local.dtype,
                local.device.type, has_onednn,
            )
            for shape, (own, n) in zip(shapes, weights, strict=True)
        ]  # fmt: skip
        self._in_place = in_place
        self._chooser = ConvChooser(problems, self._mesh)
        self._correction = None
        if aligned and not plan.is_whole:
            attributes = window.stride, window.dilation, groups
            self._correction = CorrectionPlan(
                plan,
                weights,
                self._chooser,
                lambda x, weight: unpadded_conv(plan.gathers(x), weight, *attributes),
            )

    def run(self, local: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ConvOutputs]:
        """Returns this rank's part of the result, and its state, which may hold a deferred bias."""
        if self._correction is not None:
            return corrected(local, weight, bias, self._correction)
        compute = partial(
            local_conv, weight=weight, bias=bias, chooser=self._chooser, mesh=self._mesh
        )
        if self._in_place:
            late = deferred_bias(local, bias)
            shard = compute(local, adds_bias=late is None)
            return shard, ConvOutputs(shard, late)
        channels_last = self._chooser.kernels_ahead(local, weight).channels_last
        shard = self._plan.apply(compute, local, channels_last=channels_last)
        return shard, ConvOutputs(shard)


def _padding(
    padding: int | Sequence[int] | str,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    dims = len(kernel)
    if padding == "valid":
        return ((0, 0),) * dims
    if padding == "same":
        if max(stride) > 1:
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        # As torch does: if the total is odd, the larger half is after the input.
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    pads = as_tuple(padding, dims)  # type: ignore[arg-type]
    if min(pads) < 0:
        raise RuntimeError(f"negative padding is not supported: {pads}")
    return symmetric(pads)


def _register() -> None:
    for dims, function in _FUNCTIONS.items():
        handler: Any = partial(conv, dims)
        HANDLERS[function] = handler


_register()
