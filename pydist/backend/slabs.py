"""Kernels, by name, that add a halo slab's part to a convolution's outputs and gradients.

`plain` is pydist's kernel for any device and type. On CUDA, `mma` and `tf32` do the same on tensor
cores: they read the slab from the receive buffer and add into the boundary planes. `library` is
torch's (cuDNN's) convolution of the slab, whose result is added afterwards: only the outputs and
the taps that the slab reaches take part. For a plane next to the outputs that is a convolution with
a flat kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist._loader import native


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

    @cached_property
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


_NATIVE: dict[str, Callable[..., None]] = {
    "forward": native.boundary_conv_forward,
    "dgrad": native.boundary_conv_dgrad,
    "wgrad": native.boundary_conv_wgrad,
}


def run_slab(
    name: str, problem: SlabProblem, first: Tensor, second: Tensor, target: Tensor,
    first_lo: Sequence[int], target_lo: Sequence[int],
) -> None:  # fmt: skip
    """Adds one slab's part to `target`.

    Args:
        name: of the kernel, one of `problem.candidates`.
        problem: the problem; the tensors and positions may be parts of it.
        first: inputs, or for dgrad the output's gradient.
        second: the weight; for wgrad the output's gradient.
        target: the tensor that is added to.
        first_lo: global spatial position of `first`.
        target_lo: of the target; for wgrad of the output's gradient.
    """
    where = first_lo, target_lo
    if name == "library":
        BY_LIBRARY[problem.role](problem, first, second, target, *where)
        return
    kernel, arguments = _NATIVE[problem.role], (first, second, target, *where, *problem.geometry)
    plan = None
    if name != "plain":
        plan = _plan(name, problem, first, second, target, *where)
    if plan is None or plan[0]:
        kernel(*arguments)
        return
    workspace = first.new_empty(plan[1], dtype=torch.float32) if plan[1] else None
    kernel(*arguments, kernel=name, workspace=workspace)


def unsupported(
    name: str, problem: SlabProblem, first: Tensor, second: Tensor, target: Tensor
) -> str:
    """Returns why a kernel would leave tensors to `plain`; empty if it supports them.

    Args:
        name: of the kernel; see `SlabProblem.candidates`.
        problem: the slab's part of the convolution.
        first: the first operand, of shape `problem.first`.
        second: the second operand, of shape `problem.second`.
        target: what is added to, of shape `problem.target`.
    """
    plan = _plan(name, problem, first, second, target, problem.first_lo, problem.target_lo)
    return "" if plan is None else plan[0]


def _plan(
    name: str, problem: SlabProblem, first: Tensor, second: Tensor, target: Tensor,
    first_lo: Sequence[int], target_lo: Sequence[int],
) -> tuple[str, int, float] | None:  # fmt: skip
    """Asks a tensor-core kernel about its operands; `None` for kernels that support all."""
    if name not in ("mma", "tf32"):
        return None
    return native.boundary_conv_plan(
        problem.role, first, second, target, first_lo, target_lo, *problem.geometry, name
    )


@dataclass(frozen=True)
class Reach:
    """The outputs [out, out + outs) and taps [tap, tap + taps) of one dim that a slab reaches.

    Attributes:
        start: the first input read, in the slab's indices; inputs below 0 are zeros.
        stop: one after the last input read; inputs beyond the slab's extent are zeros.
    """

    out: int
    outs: int
    tap: int
    taps: int
    start: int
    stop: int


def reach(
    inputs: int, outputs: int, kernel: int, base: int, stride: int, dilation: int
) -> Reach | None:
    """Finds the outputs and taps of one dim that a slab reaches; `None` if there are none.

    Args:
        inputs: extent of the inputs.
        outputs: of the outputs.
        kernel: taps.
        base: the input that output 0 reads through tap 0.
        stride: of the outputs.
        dilation: of the taps.
    """
    outs: list[int] = []
    taps: list[int] = []
    for k in range(kernel):
        shift = k * dilation + base
        first = max(0, -(shift // stride))
        last = min(outputs - 1, (inputs - 1 - shift) // stride)
        if first <= last:
            outs += [first, last]
            taps.append(k)
    if not taps:
        return None
    out, tap = min(outs), taps[0]
    count, width = max(outs) + 1 - out, taps[-1] + 1 - tap
    start = out * stride + tap * dilation + base
    stop = start + (count - 1) * stride + (width - 1) * dilation + 1
    return Reach(out, count, tap, width, start, stop)


def _reaches(
    inputs: Tensor, outputs: Tensor, kernel: Sequence[int], in_lo: Sequence[int],
    out_lo: Sequence[int], problem: SlabProblem,
) -> list[Reach] | None:  # fmt: skip
    found = []
    for d, (s, p, dilation) in enumerate(
        zip(problem.stride, problem.padding, problem.dilation, strict=True)
    ):
        base = out_lo[d] * s - p - in_lo[d]
        dim = reach(inputs.shape[2 + d], outputs.shape[2 + d], kernel[d], base, s, dilation)
        if dim is None:
            return None
        found.append(dim)
    return found


def _box(x: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    for dim, (start, count) in enumerate(zip(starts, counts, strict=True), start=2):
        x = x.narrow(dim, start, count)
    return x


def _outs(x: Tensor, reaches: Sequence[Reach]) -> Tensor:
    return _box(x, [r.out for r in reaches], [r.outs for r in reaches])


def _taps(x: Tensor, reaches: Sequence[Reach]) -> Tensor:
    return _box(x, [r.tap for r in reaches], [r.taps for r in reaches])


def _padded(x: Tensor, reaches: Sequence[Reach]) -> tuple[Tensor, list[int]]:
    """Returns the inputs that are read, and the padding for torch to assume around them."""
    ends = [(-r.start, r.stop - n) for r, n in zip(reaches, x.shape[2:], strict=True)]
    if all(before == after >= 0 for before, after in ends):
        return x, [before for before, _ in ends]
    return F.pad(x, [n for end in reversed(ends) for n in end]), [0] * len(ends)


def _forward_by_library(
    problem: SlabProblem, slab: Tensor, weight: Tensor, out: Tensor, slab_lo: Sequence[int],
    out_lo: Sequence[int],
) -> None:  # fmt: skip
    reaches = _reaches(slab, out, weight.shape[2:], slab_lo, out_lo, problem)
    if reaches is None:
        return
    x, padding = _padded(slab, reaches)
    part = _outs(out, reaches)
    part += torch.convolution(
        x, _taps(weight, reaches), None, problem.stride, padding, problem.dilation, False,
        (0, 0, 0), problem.groups,
    )  # fmt: skip


def _dgrad_by_library(
    problem: SlabProblem, slab: Tensor, weight: Tensor, grad_in: Tensor, slab_lo: Sequence[int],
    in_lo: Sequence[int],
) -> None:  # fmt: skip
    reaches = _reaches(grad_in, slab, weight.shape[2:], in_lo, slab_lo, problem)
    if reaches is None:
        return
    extents = grad_in.shape[2:]
    # As padding, torch leaves out inputs outside the target at both ends.
    padding = [max(0, min(-r.start, r.stop - n)) for r, n in zip(reaches, extents, strict=True)]
    found = torch.convolution(
        _outs(slab, reaches), _taps(weight, reaches), None, problem.stride, padding,
        problem.dilation, True, (0, 0, 0), problem.groups,
    )  # fmt: skip
    starts = [r.start + p for r, p in zip(reaches, padding, strict=True)]
    first = [max(0, start) for start in starts]
    counts = [
        min(n, start + m) - f
        for n, start, m, f in zip(extents, starts, found.shape[2:], first, strict=True)
    ]
    part = _box(grad_in, first, counts)
    part += _box(found, [f - start for f, start in zip(first, starts, strict=True)], counts)


def _wgrad_by_library(
    problem: SlabProblem, slab: Tensor, grad_out: Tensor, grad_weight: Tensor,
    slab_lo: Sequence[int], out_lo: Sequence[int],
) -> None:  # fmt: skip
    reaches = _reaches(slab, grad_out, grad_weight.shape[2:], slab_lo, out_lo, problem)
    if reaches is None:
        return
    x, padding = _padded(slab, reaches)
    part = _taps(grad_weight, reaches)
    part += torch.ops.aten.convolution_backward(
        _outs(grad_out, reaches), x, part, None, problem.stride, padding, problem.dilation, False,
        (0, 0, 0), problem.groups, (False, True, False),
    )[1]  # fmt: skip


BY_LIBRARY: dict[str, Callable[..., None]] = {
    "forward": _forward_by_library,
    "dgrad": _dgrad_by_library,
    "wgrad": _wgrad_by_library,
}
"""By role: (problem, first, second, target, first_lo, target_lo)."""
