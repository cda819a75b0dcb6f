"""Convolution of sharded tensors: by correction where blocks line up, else by gathering."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.ops.correction import corrected_conv, plan_correction
from pydist.ops.placement import choose_layout, conv_work
from pydist.ops.redistribute import parameter_for, redistribute
from pydist.ops.windows import Window, as_tuple, plan_window, symmetric
from pydist.tensor import HANDLERS, ShardedTensor, local_of, refusal, wrap

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
) -> ShardedTensor:
    """Convolution in 1, 2 or 3 dims; a batch dim is required.

    Source: Oyama et al., hybrid-parallel training of 3D CNNs (spatial partitioning); the
    correction is linearity: a convolution of a sum is the sum of convolutions.
    """
    function = _FUNCTIONS[dims]
    if not isinstance(input, ShardedTensor):
        raise refusal(function, (input, weight), {}, "the input is plain and the weight sharded")
    if input.dim() != dims + 2:
        raise refusal(function, (input, weight), {}, f"expected [N, C] and {dims} spatial dims")
    layout = input._layout
    if layout.splits[1] is not None:
        raise refusal(function, (input, weight), {}, "the channels are split")
    stride, dilation = as_tuple(stride, dims), as_tuple(dilation, dims)
    kernel = tuple(weight.shape[2:])
    window = Window(kernel, stride, dilation, _padding(padding, kernel, dilation, dims))
    input = redistribute(input, choose_layout(layout, conv_work(window, weight.shape)))
    plan = plan_window(input._layout, window, weight.shape[0])
    weight = parameter_for(weight, plan.out)
    bias = parameter_for(bias, plan.out)
    if plan.is_whole:
        local = local_of(input)
        call = partial(function, stride=stride, padding=padding, dilation=dilation, groups=groups)
        return wrap(call(local, weight, bias), plan.out, input)
    correction = plan_correction(window, plan, groups)
    if correction is not None:
        local = corrected_conv(local_of(input), weight, bias, correction)
        return wrap(local, plan.out, input)

    def without_padding(padded: Tensor) -> Tensor:
        return function(padded, weight, bias, stride, 0, dilation, groups)

    return wrap(plan.apply(without_padding, input), plan.out, input)


def _padding(
    padding: int | Sequence[int] | str,
    kernel: Sequence[int],
    dilation: Sequence[int],
    dims: int,
) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * dims
    if padding == "same":
        # As torch does: where the total is odd, the larger half comes after.
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    return symmetric(as_tuple(padding, dims))  # type: ignore[arg-type]


def _register() -> None:
    for dims, function in _FUNCTIONS.items():
        handler: Any = partial(conv, dims)
        HANDLERS[function] = handler


_register()
