"""Defines `ConvProblem`: the facts on which a convolution's speed and kernels depend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

ROLES = ("forward", "dgrad", "wgrad")
"""The three computations of a convolution."""
_OF_ONEDNN = (torch.float32, torch.bfloat16)
# Below this N·C·D·H torch's fp32 convolution of one sample avoids oneDNN (aten's ConvParams).
_TORCH_IS_SLOW_BELOW = 20_480
# Input channels per group below which oneDNN's channels-last wgrad sums all positions in sequence,
# and its error against fp64 is ten times that of its plain one.
_FEW_CHANNELS = 16


def onednn_has(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN supports a dtype on this machine; bf16 depends on the processor."""
    return (
        dtype in _OF_ONEDNN
        and torch.backends.mkldnn.is_available()
        and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@dataclass(frozen=True)
class ConvProblem:
    """The facts of one convolution on which its speed depends.

    Attributes:
        input: shape [N, Ci, ...] with two or three spatial dims.
        weight: shape [Co, Ci / groups, ...].
        stride: one number per spatial dim, like padding (the same before and after) and dilation.
        padding: zeros around the input.
        dilation: of the taps.
        groups: of channels.
        dtype: of input and weight.
        device: type of the device that computes.
        has_onednn: whether oneDNN supports the dtype on the machines of all ranks (`onednn_has`).
    """

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    device: str = "cpu"
    has_onednn: bool = True

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Shape that the result has."""
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
        """Number of flops that the forward convolution takes; dgrad and wgrad take as many each."""
        outputs = torch.Size(self.output).numel()
        return 2 * outputs * torch.Size(self.weight[1:]).numel()

    @cached_property
    def onednn(self) -> bool:
        """Whether oneDNN supports the problem."""
        return (
            self.device == "cpu"
            and self.has_onednn
            and len(self.input) in (4, 5)
            and onednn_has(self.dtype)
        )

    @cached_property
    def is_narrow(self) -> bool:
        """Whether a CPU computes it with numbers of 16 bits."""
        return self.device == "cpu" and self.dtype in (torch.bfloat16, torch.float16)

    @cached_property
    def wide(self) -> ConvProblem:
        """The problem that computes the same in float32."""
        return replace(self, dtype=torch.float32, has_onednn=True)

    @cached_property
    def torch_is_slow(self) -> bool:
        """Whether torch's own convolution would avoid oneDNN."""
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
    def is_product(self) -> bool:
        """Whether it multiplies a matrix with each voxel's channels: one tap, nothing else."""
        taps = {*self.weight[2:], *self.stride, self.groups}
        return taps == {1} and not any(self.padding)

    @cached_property
    def folds(self) -> bool:
        """Whether the one sample, channels-last, equals two of half the depth except at the seam.

        True for odd kernels of stride 1 with "same" padding and an even depth.
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
        """Whether an output has so few input channels that oneDNN's wgrad loses accuracy."""
        return self.weight[1] < _FEW_CHANNELS

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Distance that separates the last tap of a window from its first, in every spatial dim."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.weight[2:], strict=True))

    @cached_property
    def rest(self) -> list[int]:
        """Inputs at the end that no window reaches; the output padding of the transposed one."""
        return [
            n - ((o - 1) * s - 2 * q + reach + 1)
            for n, o, s, q, reach in zip(
                self.input[2:], self.output[2:], self.stride, self.padding, self.reach,
                strict=True,
            )
        ]  # fmt: skip

    @cached_property
    def is_overpadded(self) -> bool:
        """Whether a window is entirely in the padding."""
        return any(p > r for p, r in zip(self.padding, self.reach, strict=True))

    @cached_property
    def padding_is_modest(self) -> bool:
        """Whether padding is no larger than in a "same" convolution."""
        return all(2 * p <= r for p, r in zip(self.padding, self.reach, strict=True))

    @cached_property
    def unpadded(self) -> ConvProblem:
        """The same convolution of an input that holds its padding."""
        extents = (n + 2 * p for n, p in zip(self.input[2:], self.padding, strict=True))
        none = (0,) * len(self.padding)
        return replace(self, input=(*self.input[:2], *extents), padding=none)

    @cached_property
    def is_ordinary(self) -> bool:
        """Whether stride, dilation and groups are 1, and odd "same" kernels fit the input."""
        return (
            self.groups == 1
            and set(self.stride) == set(self.dilation) == {1}
            and all(2 * p + 1 == k for p, k in zip(self.padding, self.weight[2:], strict=True))
            and all(n >= k for n, k in zip(self.input[2:], self.weight[2:], strict=True))
        )

    @cached_property
    def is_wide(self) -> bool:
        """Whether activations outweigh the weights, as in all but a network's last layers.

        There, reordering plain weights for channels-last kernels costs more than the convolution.
        """
        activations = torch.Size(self.input).numel() + torch.Size(self.output).numel()
        return activations > 2 * torch.Size(self.weight).numel()
