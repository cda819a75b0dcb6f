"""Provides common parts of reductions over ranks: operations, dtypes, and the sum in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pydist.comm.interface.handles import Work

ReduceOp = Literal["sum", "max", "min"]

WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.bool: torch.uint8,
}
"""Accumulation dtype of each narrow dtype; the result is rounded once."""


class SliceSum(Work):
    """Reduce-scatter that exchanges slices; `wait` sums them in rank order on every rank."""

    def __init__(self, work: Work, slices: Sequence[Tensor], out: Tensor, divisor: int) -> None:
        """Takes over the slices that `work` fills.

        Args:
            work: fills the slices.
            slices: one per rank, in rank order, of the dtype of `out`.
            out: receives the sum.
            divisor: floating-point sums are divided by it before they are rounded.
        """
        self._pending: tuple[Work, Sequence[Tensor], Tensor] | None = (work, slices, out)
        self._divisor = divisor

    def done(self) -> bool:
        """Returns whether the slices have arrived; see `Work.done`."""
        return self._pending is None or self._pending[0].done()

    def wait(self) -> None:
        """Waits for the slices and sums them; see `Work.wait`."""
        if self._pending is None:
            return
        work, slices, out = self._pending
        self._pending = None
        work.wait()
        wide = WIDER.get(out.dtype, out.dtype)
        total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
        total.copy_(slices[0])
        for each in slices[1:]:
            total += each.to(wide)
        divide_(total, self._divisor)
        if total is not out:
            out.copy_(total)


def divide_(total: Tensor, divisor: int) -> None:
    """Divides a tensor in place."""
    if divisor & (divisor - 1):
        total.div_(divisor)
    elif divisor > 1:
        total.mul_(1 / divisor)  # the same bits, as a power of two has an exact inverse
