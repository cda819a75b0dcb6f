"""Slab kernels that add the result of torch's own convolution of the slab.

Only the outputs and the taps that the slab reaches take part: for a plane next to the outputs, a
convolution with a flat kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.backend.slab_problem import SlabProblem


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
