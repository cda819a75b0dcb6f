"""Defines `SlabProblem`: the parameters and kernels of a halo slab's part of a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class SlabProblem:
    """Part that one slab has in a convolution, with the parameters of the native kernels.

    Attributes:
        role: forward, dgrad or wgrad.
        first: shape of the first operand: inputs, or for dgrad the output's gradient.
        second: shape of the weight; for wgrad of the output's gradient.
        target: shape of the tensor that is added to.
        first_lo: global spatial position of the first operand.
        target_lo: of the target; for wgrad of the output's gradient.
        stride: of the convolution, one number per spatial dim, like the next two.
        padding: zeros around the input.
        dilation: of the taps.
        groups: of channels.
        dtype: of all three arrays.
        channels_last: whether activations are stored channels-last.
        device: type of the device.
        tf32: whether torch may round the factors of float32 products to tf32.
    """

    role: str
    first: tuple[int, ...]
    second: tuple[int, ...]
    target: tuple[int, ...]
    first_lo: tuple[int, ...]
    target_lo: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    channels_last: bool
    device: str = "cpu"
    tf32: bool = False

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Stride, padding, dilation and groups, in the order that native kernels expect."""
        return self.stride, self.padding, self.dilation, self.groups

    @cached_property
    def candidates(self) -> list[str]:
        """Names of the kernels that are possible; the first one is the fixed rule's choice."""
        if self.device == "cpu":
            return ["plain"]
        names = ["library", "plain"]
        if self.dtype in (torch.float16, torch.bfloat16, torch.float32):
            names.append("mma")
        if self.dtype == torch.float32 and self.tf32:
            names.append("tf32")
        return names
