"""Pools to maxima: native maxima of the shard as stored, then merged with the halo's maxima.

Each output stores the tap of its window that it took, in one byte for windows of up to 255 inputs.
A maximum over parts is the maximum of their maxima, and the tap numbers break ties. So the shard is
neither copied nor padded, and the slabs are in flight meanwhile. Backward sends gradients to the
taps: those in slabs return to their owners while the rest is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pydist._loader import native
from pydist.exchange.adjoints import average_grad
from pydist.exchange.exchanger import in_memory
from pydist.exchange.function import ExchangeFunction, way_back
from pydist.ops.constants import Constant
from pydist.ops.pool.pool_plan import PoolPlan, empty, in_3d, lo_of
from pydist.ops.windows import WindowPlan
from pydist.partition import Box


class MaxPlan(PoolPlan):
    """Plan of maxima over windows of a sharded tensor, and of the two maps that taps define."""

    def __init__(self, plan: WindowPlan, alone: bool = False) -> None:
        super().__init__(plan, alone)
        self.kernel = tuple(f.kernel for f in self.footprints)
        taps = math.prod(self.kernel)
        self.tap_dtype = torch.uint8 if taps <= torch.iinfo(torch.uint8).max else torch.int32

    def maxima(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the shards of the result and of the taps from the shard of the input."""
        y = empty(self.out, x)
        taps = torch.empty_like(y, dtype=self.tap_dtype)

        def merge(x: Tensor, box: Box, *, accumulate: bool) -> Tensor:
            native.pool_max_forward(
                in_3d(in_memory(x)), in_3d(y), in_3d(taps), lo_of(box), lo_of(self.out),
                self.footprints, accumulate,
            )  # fmt: skip
            return y

        return self._corrected(x, merge), taps

    def spread(self, grad: Tensor, taps: Tensor) -> Tensor:
        """Computes the shard of dL/dx: each gradient at the input that was the maximum."""
        timers = self.mesh.session.timers
        halo = self.exchanges(grad).halo if self.has_halo else None
        pending = None
        if halo is not None:
            slabs = halo.empty_slots(grad)
            with timers.measure("boundary"):
                for slab, box in zip(slabs, halo.slots, strict=True):
                    self._spread(grad, taps, slab, box)
            pending = halo.start_adjoint(slabs, grad)
        grad_x = empty(self.own, grad)
        with timers.measure("compute"):
            self._spread(grad, taps, grad_x, self.own)
        if halo is not None and pending is not None:
            with timers.measure("halo"):
                halo.finish_adjoint(pending, grad_x)
        return grad_x

    def pick(self, x: Tensor, taps: Tensor) -> Tensor:
        """Computes the adjoint of `spread`: the shard of the inputs at the taps."""
        y = empty(self.out, x)

        def pick(x: Tensor, box: Box, *, accumulate: bool) -> Tensor:
            native.pool_max_pick(
                in_3d(in_memory(x)), in_3d(taps), in_3d(y), lo_of(box), lo_of(self.out),
                self.footprints, accumulate,
            )  # fmt: skip
            return y

        return self._corrected(x, pick)

    def _corrected(self, x: Tensor, part: Callable[..., Tensor]) -> Tensor:
        """Applies `part` to the shard while the halo is in flight, then to each slab."""
        main = self.timed(lambda: part(x, self.own, accumulate=False))
        if not self.has_halo:
            return main()
        exchanges = self.exchanges(x)
        return exchanges.corrected(
            exchanges.halo, x, main, lambda _, __, slab, box: part(slab, box, accumulate=True)
        )

    def indices(self, taps: Tensor) -> Tensor:
        """Returns torch's indices: positions in the flattened spatial dims of the input."""
        _, kernel_h, kernel_w = self.kernel
        number = in_3d(taps).long()
        row = number // kernel_w
        along = (row // kernel_h, row % kernel_h, number % kernel_w)
        extents = (1,) * (5 - taps.dim()) + self.plan.layout.shape[2:]
        flat = torch.zeros_like(number)
        for dim, footprint in enumerate(self.footprints):
            starts = self._starts[dim].on(taps.device)
            flat = flat * extents[dim] + starts + along[dim] * footprint.dilation
        for _ in range(5 - taps.dim()):
            flat = flat.squeeze(2)
        return flat

    @cached_property
    def _starts(self) -> list[Constant]:
        """Input index at which each of this rank's windows begins, for three spatial dims."""
        found = []
        extents = (1,) * (5 - len(self.out.lo)) + tuple(self.out.shape[2:])
        for dim, (footprint, lo) in enumerate(zip(self.footprints, lo_of(self.out), strict=True)):
            first = [footprint.needs(o, o + 1)[0] for o in range(lo, lo + extents[dim])]
            starts = torch.tensor(first, dtype=torch.int64).view(-1, *(1,) * (2 - dim))
            found.append(Constant(starts))
        return found

    def _spread(self, grad: Tensor, taps: Tensor, grad_x: Tensor, box: Box) -> None:
        native.pool_max_backward(
            in_3d(grad), in_3d(taps), in_3d(grad_x), lo_of(self.out), lo_of(box), self.footprints
        )


def maximum(x: Tensor, plan: MaxPlan) -> tuple[Tensor, Tensor]:
    """Computes this rank's maxima over windows, differentiable to any order, and their taps.

    All ranks have the same plan and run the same node and exchanges, also with an empty shard.
    """
    if plan.has_halo:
        x = average_grad(x, plan.mesh, plan.plan.layout.unused_axes)
    y, taps, _ = _Maximum.apply(x, plan)
    return y, taps


def values_at_taps(x: Tensor, taps: Tensor, plan: MaxPlan) -> Tensor:
    """Returns the inputs at taps, 0 where another rank owns them; differentiable to any order.

    Args:
        x: the shard of the input, [N, C, ...].
        taps: for each output of this rank the tap of its window; see `MaxPlan.maxima`.
        plan: of the pooling.
    """
    result: Tensor = _Pick.apply(x, taps, plan)[0]
    return result


class _Maximum(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: MaxPlan) -> tuple[Tensor, Tensor, Tensor]:
        y, taps = plan.maxima(x)
        ctx.plan, ctx.mesh = plan, plan.mesh
        ctx.mark_non_differentiable(taps)
        way = way_back(x)
        ctx.save_for_backward(taps, way)
        return y, taps, way

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor, None]:
        taps, way = saved
        return _Spread.apply(grad, way, taps, ctx.plan), None


class _Spread(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(ctx: Any, grad: Tensor, way: Tensor, taps: Tensor, plan: MaxPlan) -> Tensor:
        ctx.plan, ctx.mesh = plan, plan.mesh
        ctx.save_for_backward(taps)
        return plan.spread(grad, taps)

    @staticmethod
    def backward(ctx: Any, saved: Any, x: Tensor) -> tuple[Tensor | None, ...]:
        (taps,) = saved
        return values_at_taps(x, taps, ctx.plan), x.new_zeros(0), None, None


class _Pick(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, plan: MaxPlan) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.mesh = plan, plan.mesh
        way = way_back(x)
        ctx.save_for_backward(taps, way)
        return plan.pick(x, taps), way

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
        taps, way = saved
        return _Spread.apply(grad, way, taps, ctx.plan), None, None
