"""Pools to averages: native sums over the shard as stored, then the halo's contribution.

Pooling is linear: the result is the pooled shard, zero padded, plus the pooled slabs of the halo.
So the shard is neither copied nor padded, the slabs are in flight meanwhile, and nothing is saved
for backward, which works the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pydist._loader import native
from pydist.exchange.exchanger import in_memory
from pydist.exchange.function import ExchangeFunction, way_back
from pydist.ops.constants import Constant
from pydist.ops.fusion.relu import leaky_relu_
from pydist.ops.pool.pool_plan import PoolPlan, empty, footprints_of, in_3d, lo_of
from pydist.ops.windows import Window, WindowPlan
from pydist.partition import Box, Footprint


@dataclass(frozen=True)
class Averaging:
    """Window sums that are multiplied by scales, independent of the layout of inputs and outputs.

    Attributes:
        window: without dilation.
        scales: for each spatial dim, one float64 factor per output of the global domain, in
            host memory.
    """

    window: Window
    scales: Sequence[Tensor]

    def means(
        self,
        x: Tensor,
        inputs: Box,
        outputs: Box,
        into: Tensor | None = None,
        negative_slope: float = 1.0,
    ) -> Tensor:
        """Computes the contribution of a box of inputs to the outputs.

        Args:
            x: [N, C, ...], the values of `inputs`.
            inputs: a box of the domain.
            outputs: a box in output indices.
            into: of the shape of `outputs`; the contribution of x is added to it.
            negative_slope: of a ReLU applied to x first; 1 for no ReLU.

        Returns:
            `into`, or a new tensor in the memory format of x.
        """
        y = empty(outputs, x) if into is None else into
        if y.numel() and x.numel():
            native.pool_sum_forward(
                in_3d(in_memory(x)), in_3d(y), lo_of(inputs), lo_of(outputs),
                self._footprints, self._scales(outputs, x.device), into is not None,
                negative_slope,
            )  # fmt: skip
        elif into is None:
            y.zero_()
        return y

    def spread(
        self,
        grad: Tensor,
        outputs: Box,
        inputs: Box,
        into: Tensor | None = None,
        x: Tensor | None = None,
        negative_slope: float = 1.0,
    ) -> Tensor:
        """Computes the adjoint of `means`: the contribution of `outputs` to dL/dx of `inputs`.

        Args:
            grad: dL/dy.
            outputs: box of `grad`.
            inputs: box of the result.
            into: of the shape of `inputs`; the contribution of `grad` is added to it.
            x: the input or the result of the ReLU, if there is one; dL/dx gets its memory
                format.
            negative_slope: of the ReLU; 1 for no ReLU.
        """
        grad_x = (
            (empty(inputs, grad) if x is None else torch.empty_like(x)) if into is None else into
        )
        if grad_x.numel() and grad.numel():
            native.pool_sum_backward(
                in_3d(grad), in_3d(grad_x), lo_of(outputs), lo_of(inputs),
                self._footprints, self._scales(outputs, grad.device), into is not None,
                None if x is None else in_3d(x), negative_slope,
            )  # fmt: skip
        elif into is None:
            grad_x.zero_()
        return grad_x

    @cached_property
    def _footprints(self) -> list[Footprint]:
        return footprints_of(self.window)

    def _scales(self, outputs: Box, device: torch.device) -> list[Tensor]:
        found = self._cut.get((outputs, device))
        if found is None:
            own = [
                scale.on(device)[lo:hi]
                for scale, lo, hi in zip(
                    self._constants, outputs.lo[2:], outputs.hi[2:], strict=True
                )
            ]
            one = torch.ones(1, dtype=torch.float64, device=device)
            found = self._cut[outputs, device] = [one] * (3 - len(own)) + own
        return found

    @cached_property
    def _constants(self) -> list[Constant]:
        return [Constant(scale) for scale in self.scales]

    @cached_property
    def _cut(self) -> dict[tuple[Box, torch.device], list[Tensor]]:
        """The scales of a box of outputs; a plan has few boxes."""
        return {}


class AveragePlan(PoolPlan):
    """Plan that computes means over windows of a sharded tensor, or their adjoint."""

    def __init__(self, averaging: Averaging, plan: WindowPlan) -> None:
        super().__init__(plan)
        self.averaging = averaging

    def pool(self, x: Tensor, negative_slope: float = 1.0) -> Tensor:
        """Computes the shard [N, C, ...] of the result from the shard of the input.

        The message is the ReLU's result, computed in the send buffer. So each rank may choose on
        its own whether its pool applies the ReLU.

        Args:
            x: the shard.
            negative_slope: of a ReLU applied to all inputs first; 1 for no ReLU.
        """
        exchanges, means = self.exchanges(x), self.averaging.means
        return exchanges.corrected(
            exchanges.halo,
            x,
            self.timed(lambda: means(x, self.own, self.out, None, negative_slope)),
            lambda y, _, slab, box: means(slab, box, self.out, y),
            partial(leaky_relu_, negative_slope=negative_slope),
        )

    def spread(self, grad: Tensor, x: Tensor | None = None, negative_slope: float = 1.0) -> Tensor:
        """Computes the shard of dL/dx from the shard of dL/dy.

        Args:
            grad: dL/dy.
            x: the shard before or after the ReLU, if there is one.
            negative_slope: of the ReLU; 1 for no ReLU.
        """
        exchanges, spread = self.exchanges(grad), self.averaging.spread
        return exchanges.corrected(
            exchanges.grad_halo,
            grad,
            self.timed(lambda: spread(grad, self.out, self.own, None, x, negative_slope)),
            lambda grad_x, _, slab, box: spread(slab, box, self.own, grad_x, x, negative_slope),
        )

    def adjoint(self, grad: Tensor, way: Tensor) -> Tensor:
        """Computes the shard of dL/dx from the shard of dL/dy, differentiable to any order.

        Args:
            grad: dL/dy.
            way: the `way_back` to x.
        """
        result: Tensor = _Spread.apply(grad, way, self)
        return result


def average(x: Tensor, plan: AveragePlan) -> Tensor:
    """Computes this rank's means over windows, differentiable to any order.

    All ranks have the same plan and run the same node and exchanges, also with an empty shard.
    """
    result: Tensor = _Average.apply(x, plan)[0]
    return result


class _Average(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AveragePlan) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.mesh = plan, plan.mesh
        way = way_back(x)
        ctx.save_for_backward(way)
        return plan.pool(x), way

    @staticmethod
    def backward(ctx: Any, saved: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        (way,) = saved
        return ctx.plan.adjoint(grad, way), None


class _Spread(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(ctx: Any, grad: Tensor, way: Tensor, plan: AveragePlan) -> Tensor:
        ctx.plan, ctx.mesh = plan, plan.mesh
        return plan.spread(grad)

    @staticmethod
    def backward(ctx: Any, _: Any, x: Tensor) -> tuple[Tensor | None, ...]:
        return average(x, ctx.plan), x.new_zeros(0), None
