"""The convolution of one shard on the CPU: torch's kernels behind one interface.

torch's own `conv3d` leaves oneDNN for a path that is up to twenty times slower when one sample is
small, and splitting a sample makes it small. So oneDNN is called by name here, forward and
backward, on plain and on channels-last tensors; `pydist.backend.choice` picks among what a problem
allows. Types that oneDNN does not take (float64 above all) go to torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist._loader import native

_OF_ONEDNN = (torch.float32, torch.bfloat16)
# Below this N·C·D·H torch's fp32 convolution of one sample leaves oneDNN (aten's ConvParams).
_TORCH_IS_SLOW_BELOW = 20_480
# Input channels of a group below which oneDNN's channels-last wgrad adds all positions in one row,
# and is ten times as far from fp64 as its plain one.
_FEW_CHANNELS = 16
# Output planes that the native wgrad takes at once: their copies stay in the cache.
_PLANES_AT_ONCE = 8

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last format of a tensor, by its number of dims."""


@dataclass(frozen=True)
class ConvProblem:
    """One convolution, as far as speed depends on it.

    Attributes:
        input: [N, Ci, ...] with two or three spatial dims.
        weight: [Co, Ci / groups, ...].
        stride: one number a spatial dim, as padding (before and after alike) and dilation.
        padding: zeros around the input.
        dilation: between the taps.
        groups: of channels.
        dtype: of input and weight.
        device: type of the device that computes.
    """

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    device: str = "cpu"

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Shape of the result."""
        extents = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                self.input[2:], self.weight[2:], self.stride, self.padding, self.dilation,
                strict=True,
            )
        )  # fmt: skip
        return (self.input[0], self.weight[0], *extents)

    @cached_property
    def flops(self) -> int:
        """Of the forward convolution; dgrad and wgrad take as many each."""
        outputs = torch.Size(self.output).numel()
        return 2 * outputs * torch.Size(self.weight[1:]).numel()

    @cached_property
    def onednn(self) -> bool:
        """Whether oneDNN takes it."""
        return (
            self.device == "cpu"
            and self.dtype in _OF_ONEDNN
            and len(self.input) in CHANNELS_LAST
            and torch.backends.mkldnn.is_available()
            and (self.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )

    @cached_property
    def torch_is_slow(self) -> bool:
        """Whether torch's own convolution would not take oneDNN."""
        if not self.onednn or self.dtype != torch.float32:
            return False
        if self.is_pointwise:
            return True
        large_kernel = all(k > 3 for k in self.weight[-2:])
        elements = torch.Size(self.input[:4]).numel()
        return (
            self.groups == 1
            and not large_kernel
            and self.input[0] == 1
            and elements <= _TORCH_IS_SLOW_BELOW
        )

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether the last dims have one tap, which torch computes itself on one thread."""
        return set(self.weight[-2:]) == set(self.stride) == set(self.dilation) == {1}

    @cached_property
    def folds(self) -> bool:
        """Whether the one sample, channels-last, is two samples of half the depth but for a seam.

        So it is for odd kernels of stride 1 with "same" padding and an even depth.
        """
        if len(self.input) != 5 or self.input[0] != 1 or self.is_pointwise:
            return False
        half = self.input[2] // 2
        return (
            self.input[2] % 2 == 0
            and self.stride[0] == 1
            and 2 * self.padding[0] == self.dilation[0] * (self.weight[2] - 1)
            and half >= self.padding[0]
        )

    @cached_property
    def has_few_channels(self) -> bool:
        """Whether an output sees so few input channels that oneDNN's wgrad loses accuracy."""
        return self.weight[1] < _FEW_CHANNELS

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """How far the last tap of a window is from its first, in every spatial dim."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.weight[2:], strict=True))

    @cached_property
    def rest(self) -> list[int]:
        """Inputs at the end that no window reaches: output padding, if transposed."""
        return [
            n - ((o - 1) * s - 2 * q + reach + 1)
            for n, o, s, q, reach in zip(
                self.input[2:], self.output[2:], self.stride, self.padding, self.reach,
                strict=True,
            )
        ]  # fmt: skip

    @cached_property
    def is_overpadded(self) -> bool:
        """Whether a window lies in the padding as a whole."""
        return any(p > r for p, r in zip(self.padding, self.reach, strict=True))

    @cached_property
    def padding_is_modest(self) -> bool:
        """Whether padding is at most that of a "same" convolution."""
        return all(2 * p <= r for p, r in zip(self.padding, self.reach, strict=True))

    @cached_property
    def unpadded(self) -> ConvProblem:
        """The same convolution of an input that holds its padding."""
        extents = (n + 2 * p for n, p in zip(self.input[2:], self.padding, strict=True))
        none = (0,) * len(self.padding)
        return replace(self, input=(*self.input[:2], *extents), padding=none)

    @cached_property
    def is_ordinary(self) -> bool:
        """Stride 1, no dilation, no groups, odd kernels with "same" padding that fit the input."""
        return (
            self.groups == 1
            and set(self.stride) == set(self.dilation) == {1}
            and all(2 * p + 1 == k for p, k in zip(self.padding, self.weight[2:], strict=True))
            and all(n >= k for n, k in zip(self.input[2:], self.weight[2:], strict=True))
        )

    @cached_property
    def is_wide(self) -> bool:
        """Whether activations outweigh the weights, as they do but in a network's last layers.

        There, plain weights are brought into the order that channels-last kernels want at a price
        above that of the convolution.
        """
        activations = torch.Size(self.input).numel() + torch.Size(self.output).numel()
        return activations > 2 * torch.Size(self.weight).numel()


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
    """A copy of the input with its padding around it, as `p.unpadded` takes it."""
    return F.pad(x, [n for padding in reversed(p.padding) for n in (padding, padding)])


def _forward_padded(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of a copy with its padding around it."""
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
    """The transposed convolution of which `p` is the adjoint: `x` has the shape of p's output.

    Args:
        p: the convolution that leads back.
        x: [N, Ci, ...] of shape `p.output`.
        weight: [Ci, Co / groups, ...], as of `p`.
        bias: [Co] or `None`.

    Returns:
        A tensor of shape `p.input`.
    """
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
    """That of a padded copy, cut to what is wanted."""
    whole = _transposed_by_onednn(p.unpadded, x, weight, bias)
    for dim, (start, length) in enumerate(zip(p.padding, p.input[2:], strict=True), start=2):
        whole = whole.narrow(dim, start, length)
    return whole


def _dgrad_by_onednn(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """The transposed convolution of dL/dy, which is what dgrad is."""
    return _transposed_by_onednn(p, grad, weight, None)


def _dgrad_padded(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return _transposed_padded(p, grad, weight, None)


def _wgrad_by_torch(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    return _backward_by_torch(p, x, grad, weight, (False, True))[1]


def _wgrad_blocked(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """In oneDNN's own layout, which costs a copy of both."""
    return _backward_by_torch(p, x.to_mkldnn(), grad.to_mkldnn(), weight, (False, True))[1]


def _wgrad_padded(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Of a copy with its padding around it."""
    return _wgrad_blocked(p.unpadded, padded(p, x), grad, weight)


def _wgrad_widened(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """In float32, rounded once."""
    wide = replace(p, dtype=torch.float32)
    kernel = WGRAD[candidates(wide, False)[2][0]]
    return kernel(wide, x.float(), grad.float(), weight.float()).to(p.dtype)


def _wgrad_folded(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """As two samples of half the depth, which torch leaves to oneDNN; then the seam between them.

    The halves are views. What crosses the seam is added as the slabs of a neighbour are.
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


def _wgrad_native(p: ConvProblem, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """By pydist's own kernel, which adds up few positions at a time: the closest to fp64."""
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
}
DGRAD: dict[str, Gradient] = {
    "torch": _dgrad_by_torch,
    "onednn": _dgrad_by_onednn,
    "padded": _dgrad_padded,
}
WGRAD: dict[str, Gradient] = {
    "torch": _wgrad_by_torch,
    "folded": _wgrad_folded,
    "blocked": _wgrad_blocked,
    "padded": _wgrad_padded,
    "widened": _wgrad_widened,
    "native": _wgrad_native,
}
"""The kernels of each role by name, the likely best first where several are possible."""


def formats(problem: ConvProblem) -> list[bool]:
    """Whether activations may lie channels-last; the best guess first.

    oneDNN's channels-last convolutions of a single channel (whose strides fit either format), and
    bf16 ones of groups, were seen to give wrong numbers (torch 2.13): only plain tensors are safe.
    """
    safe = problem.input[1] > 1 and (problem.groups == 1 or problem.dtype == torch.float32)
    if not problem.onednn or not safe:
        return [False]
    return [True, False] if problem.is_wide else [False, True]


def candidates(problem: ConvProblem, channels_last: bool) -> tuple[list[str], list[str], list[str]]:
    """Names of the kernels that a problem allows: forward, dgrad, wgrad; the best guess first."""
    if not problem.onednn:
        return ["torch"], ["torch"], ["torch"]
    # What torch 2.13 was seen to do: with whole windows in the padding oneDNN crashes.
    forward, dgrad = (["padded"], ["padded"]) if problem.is_overpadded else (["onednn"], ["onednn"])
    if problem.dtype == torch.bfloat16 and not problem.is_ordinary:
        # Its bf16 wgrad reads and writes beyond its tensors.
        return forward, dgrad, ["widened"]
    if not problem.padding_is_modest:
        # So does its fp32 wgrad, where strides are wide as well.
        return forward, dgrad, ["padded"]
    if not problem.torch_is_slow:
        dgrad, wgrad = [*dgrad, "torch"], ["torch", "blocked"]
    else:
        wgrad = ["folded", "blocked"] if problem.folds and channels_last else ["blocked"]
    if problem.dtype == torch.float32 and problem.has_few_channels:
        # oneDNN's plain kernels are accurate, and slow from four channels on.
        wgrad = ["native"] if channels_last else ["native", *wgrad]
    return forward, dgrad, wgrad


def in_format(x: Tensor, channels_last: bool) -> Tensor:
    """The same tensor in plain or channels-last memory; a copy only if it lies otherwise.

    Dims of extent 1 get the strides of the format too. torch ignores them where it asks whether a
    tensor is contiguous, but not where it guesses its format, and then runs kernels of another.
    """
    order = (0, *range(2, x.dim()), 1) if channels_last else tuple(range(x.dim()))
    lying = x.permute(order)
    step, strides = 1, []
    for extent in reversed(lying.shape):
        strides.append(step)
        step *= extent
    if lying.stride() == tuple(reversed(strides)):
        return x
    lying = lying.contiguous().view(-1).view(lying.shape)
    return lying.permute([order.index(d) for d in range(x.dim())])
