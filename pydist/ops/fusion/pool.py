"""Pools a convolution's outputs to averages, fused with an in-place ReLU before the pool.

The pool reads the convolution's outputs and applies the ReLU as it adds them up. The ReLU's result
is stored only in the send buffers of the pool's halo. So a rank on which the ReLU has already been
applied, because its result was read there, sends the same values as the other ranks. Backward adds
up dL/dz as the pool alone does, with the same messages, and applies the ReLU's derivative, by the
sign of the outputs, before writing the sums. They are already dL/dy, which the ReLU's node passes
on.

Memory traffic of a step with a pool of stride 2 (1/8 as many outputs), in units of the
convolution's outputs read and written: apart 2 (ReLU) + 1 1/8 (pool) forward and 1 1/8 + 3
backward; fused 1 1/8 and 2 1/8.

If the ReLU's result is used elsewhere, before or after the pool, it is computed in place at that
time, and backward runs unfused. So does double backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pydist.exchange.function import ExchangeFunction, way_back
from pydist.mesh import Mesh
from pydist.ops.fusion.handover import runs
from pydist.ops.fusion.relu import DeferredRelu
from pydist.tensor import ShardedTensor
from pydist.tensor.wrapper import refuse_foreign_graph


class Pooling(Protocol):
    """Interface that linear pools share, such as `pydist.ops.pool.average.AveragePlan`."""

    mesh: Mesh

    def pool(self, x: Tensor, negative_slope: float = 1.0) -> Tensor:
        """Pools a shard after a ReLU; a slope of 1 means no ReLU."""

    def spread(self, grad: Tensor, x: Tensor | None = None, negative_slope: float = 1.0) -> Tensor:
        """Returns dL/dx, through the ReLU of x."""

    def adjoint(self, grad: Tensor, way: Tensor) -> Tensor:
        """Returns dL/dx without the ReLU, differentiable to any order."""


def average_pool_of_relu(x: ShardedTensor, plan: Pooling) -> Tensor | None:
    """Pools x and applies its deferred ReLU in one pass, if x has one.

    Args:
        x: the input of the pool; its ReLU stays deferred.
        plan: of the pool.

    Returns:
        The shard of the result; `None`, without any effect, if there is nothing to fuse with.
    """
    pending = x._deferred
    if not isinstance(pending, DeferredRelu):
        return None
    refuse_foreign_graph(x)
    if not pending.read():
        return None
    result: Tensor = _AverageOfRelu.apply(x._shard, x._shard.detach(), pending, plan)[0]
    return result


class _AverageOfRelu(ExchangeFunction):
    part = None  # several

    @staticmethod
    def forward(
        ctx: Any, relu: Tensor, linear: Tensor, pending: DeferredRelu, plan: Pooling
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.mesh, ctx.handover = plan, plan.mesh, pending.handover
        ctx.negative_slope = pending.negative_slope
        way = way_back(linear)
        ctx.save_for_backward(linear, way)
        return plan.pool(linear, pending.negative_slope), way

    @staticmethod
    def backward(
        ctx: Any, saved: Any, grad: Tensor, _: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        linear, way = saved
        plan, rest = ctx.plan, (None,) * 3
        # In double backward, gradients reach the ReLU on other paths as well.
        ctx.handover.is_shared |= torch.is_grad_enabled()
        if ctx.handover.is_shared or not runs(ctx, 0):
            return plan.adjoint(grad, way), *rest
        grad_linear = plan.spread(grad, linear, ctx.negative_slope)
        ctx.handover.give(grad_linear, True)
        return grad_linear, *rest
