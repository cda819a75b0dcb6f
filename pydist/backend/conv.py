"""Calls kernels for the convolution of one shard on the CPU, by a common interface.

For one small sample, torch's `conv3d` does not use oneDNN but a path that is up to twenty times
slower, and splitting a sample makes it small. So this module calls oneDNN explicitly, forward and
backward, on plain and channels-last tensors; `conv_kernels` picks among the kernels that a problem
allows. Types that oneDNN does not support (above all float64) go to torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist._loader import native
from pydist.backend.problem import ConvProblem

# Output planes per call of the native wgrad. Where it copies them, the copies stay in the cache.
# Where it reads them in place, the number only determines the order of summation.
_PLANES_AT_ONCE = 8
# Positions whose products a matrix product sums; longer sums lose accuracy.
_POSITIONS_AT_ONCE = 8192

Forward = Callable[[ConvProblem, Tensor, Tensor, Tensor | None], Tensor]
"""(problem, x, weight, bias) -> y"""
Gradient = Callable[[ConvProblem, Tensor, Tensor, Tensor], Tensor]
"""dgrad: (problem, x, grad, weight) -> dL/dx. wgrad: the same -> dL/dweight."""


def _forward_by_torch(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    none = (0,) * len(p.stride)
    return torch.convolution(
        x, weight, bias, p.stride, p.padding, p.dilation, False, none, p.groups
    )


def _forward_by_onednn(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mkldnn_convolution(x, weight, bias, p.padding, p.stride, p.dilation, p.groups)


def padded(p: ConvProblem, x: Tensor) -> Tensor:
    """Returns a copy of the input with its padding around it, the input of `p.unpadded`."""
    return F.pad(x, [n for padding in reversed(p.padding) for n in (padding, padding)])


def _forward_padded(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolves a copy of the input that holds its padding."""
    return _forward_by_onednn(p.unpadded, padded(p, x), weight, bias)


def _backward_by_torch(
    p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    none = (0,) * len(p.stride)
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, p.stride, p.padding, p.dilation, False, none, p.groups,
        [*wanted, False],
    )  # fmt: skip


def _dgrad_by_torch(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return _backward_by_torch(p, x, grad, weight, (True, False))[0]


def transposed(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the transposed convolution whose adjoint is `p`; `x` has the shape of p's output.

    Args:
        p: the adjoint convolution.
        x: [N, Ci, ...] of shape `p.output`.
        weight: [Ci, Co / groups, ...], as of `p`.
        bias: [Co] or `None`.

    Returns:
        A tensor of shape `p.input`.
    """
    if p.is_narrow and not p.onednn:
        bias = None if bias is None else bias.float()
        return transposed(p.wide, x.float(), weight.float(), bias).to(p.dtype)
    if not p.onednn:
        return torch.convolution(
            x, weight, bias, p.stride, p.padding, p.dilation, True, p.rest, p.groups
        )
    return (_transposed_padded if p.is_overpadded else _transposed_by_onednn)(p, x, weight, bias)


def _transposed_by_onednn(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._convolution_transpose_pointwise(
        x, weight, bias, p.padding, p.rest, p.stride, p.dilation, p.groups, "none", [], ""
    )


def _transposed_padded(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Runs oneDNN's transposed convolution without padding, and cuts the result to size."""
    whole = _transposed_by_onednn(p.unpadded, x, weight, bias)
    for dim, (start, length) in enumerate(zip(p.padding, p.input[2:], strict=True), start=2):
        whole = whole.narrow(dim, start, length)
    return whole


def _dgrad_by_onednn(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dx as the transposed convolution of dL/dy."""
    return _transposed_by_onednn(p, grad, weight, None)


def _dgrad_padded(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return _transposed_padded(p, grad, weight, None)


def _wgrad_by_torch(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return _backward_by_torch(p, x, grad, weight, (False, True))[1]


def _wgrad_blocked(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dweight in oneDNN's blocked layout, into which it copies both operands."""
    return _backward_by_torch(p, x.to_mkldnn(), grad.to_mkldnn(), weight, (False, True))[1]


def _wgrad_padded(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dweight from a copy of the input that holds its padding."""
    return _wgrad_blocked(p.unpadded, padded(p, x), grad, weight)


def _forward_widened(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolves in float32, and rounds the result once."""
    kernel = FORWARD[candidates(p.wide, False)[0][0]]
    bias = None if bias is None else bias.float()
    return kernel(p.wide, x.float(), weight.float(), bias).to(p.dtype)


def _dgrad_widened(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dx in float32, and rounds it once."""
    kernel = DGRAD[candidates(p.wide, False)[1][0]]
    return kernel(p.wide, x.float(), grad.float(), weight.float()).to(p.dtype)


def _wgrad_widened(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dweight in float32, and rounds it once."""
    kernel = WGRAD[candidates(p.wide, False)[2][0]]
    return kernel(p.wide, x.float(), grad.float(), weight.float()).to(p.dtype)


def _wgrad_folded(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dweight of one sample as of two with half the depth, and adds the seam's part.

    The halves are views. The contributions across the seam are added like a neighbor's slabs.
    """
    half, reach = p.input[2] // 2, p.padding[0]
    total = _wgrad_by_torch(p, _two_halves(x), _two_halves(grad), weight).contiguous()
    geometry = p.stride, p.padding, p.dilation, p.groups
    for first, stop, start in ((half, half + reach, 0), (half - reach, half, half)):
        native.boundary_conv_wgrad(
            x[:, :, first:stop], grad[:, :, start : start + half], total,
            (first, 0, 0), (start, 0, 0), *geometry,
        )  # fmt: skip
    return total


def _wgrad_product(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dweight of a convolution of one tap by products of matrices, without copies."""
    total = torch.zeros(weight.shape[:2], dtype=weight.dtype)
    for rows, own in zip(grad, x, strict=True):
        of_grad, of_x = _columns(rows), _columns(own)
        parts = zip(*(t.split(_POSITIONS_AT_ONCE, 1) for t in (of_grad, of_x)), strict=True)
        total += torch.stack([a @ b.T for a, b in parts]).sum(0)
    return total.view(weight.shape)


def _columns(x: Tensor) -> Tensor:
    """Returns [C, ...] in either memory format as a matrix [C, positions]; a view."""
    return x.flatten(1) if x.is_contiguous() else x.movedim(0, -1).flatten(0, -2).T


def _wgrad_native(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Computes dL/dweight by pydist's kernel, whose short partial sums are closest to fp64."""
    if x.dim() == 4:
        deep = replace(
            p, input=_with_depth(p.input), weight=_with_depth(p.weight),
            stride=(1, *p.stride), padding=(0, *p.padding), dilation=(1, *p.dilation),
        )  # fmt: skip
        operands = (t.unsqueeze(2) for t in (x, grad, weight))
        return _wgrad_native(deep, *operands).squeeze(2)
    total = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    geometry = p.stride, p.padding, p.dilation, p.groups
    stride, before, planes = p.stride[0], p.padding[0], p.output[2]
    for first in range(0, planes, _PLANES_AT_ONCE):
        count = min(_PLANES_AT_ONCE, planes - first)
        start = first * stride - before
        lo, hi = max(start, 0), min(start + (count - 1) * stride + p.reach[0] + 1, p.input[2])
        if lo < hi:
            native.boundary_conv_wgrad(
                x.narrow(2, lo, hi - lo), grad.narrow(2, first, count), total,
                (lo, 0, 0), (first, 0, 0), *geometry,
            )  # fmt: skip
    return total


def _with_depth(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:2], 1, *shape[2:])


def _two_halves(x: Tensor) -> Tensor:
    rows = x.permute(0, 2, 3, 4, 1)
    _, depth, *rest = rows.shape
    return rows.view(2, depth // 2, *rest).permute(0, 4, 1, 2, 3)


FORWARD: dict[str, Forward] = {
    "torch": _forward_by_torch,
    "onednn": _forward_by_onednn,
    "padded": _forward_padded,
    "widened": _forward_widened,
}
DGRAD: dict[str, Gradient] = {
    "torch": _dgrad_by_torch,
    "onednn": _dgrad_by_onednn,
    "padded": _dgrad_padded,
    "widened": _dgrad_widened,
}
WGRAD: dict[str, Gradient] = {
    "torch": _wgrad_by_torch,
    "folded": _wgrad_folded,
    "blocked": _wgrad_blocked,
    "padded": _wgrad_padded,
    "widened": _wgrad_widened,
    "native": _wgrad_native,
    "product": _wgrad_product,
}
"""The kernels of each role by name, the best guess first where several are possible."""


def formats(problem: ConvProblem) -> list[bool]:
    """Returns whether activations may be stored channels-last, as options, the best guess first.

    oneDNN's channels-last convolutions of a single channel (whose strides fit either format) and
    its grouped bf16 ones gave wrong numbers in torch 2.13: only plain tensors are safe for them.
    """
    safe = problem.input[1] > 1 and (problem.groups == 1 or problem.dtype == torch.float32)
    if not problem.onednn or not safe:
        return [False]
    return [True, False] if problem.is_wide else [False, True]


def candidates(problem: ConvProblem, channels_last: bool) -> tuple[list[str], list[str], list[str]]:
    """Returns names of possible forward, dgrad and wgrad kernels, the best guess first."""
    if problem.is_narrow and not (problem.onednn and problem.is_ordinary):
        # oneDNN's bf16 wgrad accesses memory out of bounds. On CPUs with AMX, its bf16 forward gave
        # wrong numbers and crashed, also where torch itself calls it. Without oneDNN, torch's own
        # kernels take 3 to 20 times as long as float32, and sum a window's gradients in 16 bits.
        return ["widened"], ["widened"], ["widened"]
    if not problem.onednn:
        return ["torch"], ["torch"], ["torch"]
    # Observed in torch 2.13: with complete windows in the padding, oneDNN crashes.
    forward, dgrad = (["padded"], ["padded"]) if problem.is_overpadded else (["onednn"], ["onednn"])
    if not problem.padding_is_modest:
        # Its fp32 wgrad does the same, where strides are wide as well.
        return forward, dgrad, ["padded"]
    if not problem.torch_is_slow:
        dgrad, wgrad = [*dgrad, "torch"], ["torch", "blocked"]
    else:
        wgrad = ["folded", "blocked"] if problem.folds and channels_last else ["blocked"]
    if problem.dtype == torch.float32 and problem.has_few_channels:
        # oneDNN's plain kernels are accurate, and slow from four channels on.
        wgrad = ["native"] if channels_last else ["native", *wgrad]
    if problem.dtype == torch.float32 and problem.is_product:
        wgrad = ["product", *wgrad]
    return forward, dgrad, wgrad


def in_format(x: Tensor, channels_last: bool) -> Tensor:
    """Returns the tensor in plain or channels-last memory; a copy only if its layout differs.

    Dims of extent 1 get the strides of the format too. torch ignores them when it checks whether a
    tensor is contiguous, but not when it infers its format, and then runs kernels of the other.
    """
    if x.stride() == _strides(x.shape, channels_last):
        return x
    order = _order(x.dim(), channels_last)
    lying = x.permute(order).contiguous()
    lying = lying.view(-1).view(lying.shape)
    return lying.permute([order.index(d) for d in range(x.dim())])


def _order(dims: int, channels_last: bool) -> tuple[int, ...]:
    """Returns the order of dims in memory."""
    return (0, *range(2, dims), 1) if channels_last else tuple(range(dims))


@lru_cache(maxsize=4096)
def _strides(shape: torch.Size, channels_last: bool) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in reversed(_order(len(shape), channels_last)):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)
