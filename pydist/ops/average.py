"""Average pooling: native sums over the shard as it lies; the halo's part added after.

Pooling is linear: the pooled shard, zero padded, plus the pooled slabs of the halo. So the shard is
neither copied nor padded, the slabs travel meanwhile, and nothing is saved for backward, which has
the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pydist._loader import native
from pydist.comm.adjoints import begin_backward, exchange_marker
from pydist.comm.exchanger import Exchanger, Pending, in_memory
from pydist.ops.windows import Exchanges, Window, WindowPlan
from pydist.partition import Box


@dataclass(frozen=True)
class Averaging:
    """Sums over windows, each times a scale: what is computed, whoever holds the parts.

    Attributes:
        window: without dilation.
        scales: for each spatial dim, one float64 factor an output of the whole domain.
    """

    window: Window
    scales: Sequence[Tensor]

    def means(self, x: Tensor, inputs: Box, outputs: Box, into: Tensor | None = None) -> Tensor:
        """The part of the outputs that comes from a box of inputs.

        Args:
            x: [N, C, ...], the values of `inputs`.
            inputs: a box of the domain.
            outputs: a box in the outputs' own indices.
            into: of the shape of `outputs`; what comes from x is added to it.

        Returns:
            `into`, or a new tensor in the memory format of x.
        """
        y = _empty(outputs, x) if into is None else into
        if y.numel() and x.numel():
            native.pool_sum_forward(
                _in_3d(in_memory(x)), _in_3d(y), _lo(inputs), _lo(outputs), *self._geometry,
                self._scales(outputs), into is not None,
            )  # fmt: skip
        elif into is None:
            y.zero_()
        return y

    def spread(self, grad: Tensor, outputs: Box, inputs: Box, into: Tensor | None = None) -> Tensor:
        """The adjoint of `means`: dL/dx of a box of inputs, as far as it comes from `outputs`."""
        grad_x = _empty(inputs, grad) if into is None else into
        if grad_x.numel() and grad.numel():
            native.pool_sum_backward(
                _in_3d(in_memory(grad)), _in_3d(grad_x), _lo(outputs), _lo(inputs),
                *self._geometry, self._scales(outputs), into is not None,
            )  # fmt: skip
        elif into is None:
            grad_x.zero_()
        return grad_x

    @property
    def _geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        more = 3 - len(self.window.kernel)
        before = (lo for lo, _ in self.window.padding)
        return (
            (1,) * more + self.window.kernel,
            (1,) * more + self.window.stride,
            (0,) * more + tuple(before),
        )

    def _scales(self, outputs: Box) -> list[Tensor]:
        one = torch.ones(1, dtype=torch.float64)
        own = [
            scale[lo:hi]
            for scale, lo, hi in zip(self.scales, outputs.lo[2:], outputs.hi[2:], strict=True)
        ]
        return [one] * (3 - len(own)) + own


class AveragePlan:
    """Means over windows of a sharded tensor, and their adjoint, with one exchange each."""

    def __init__(self, averaging: Averaging, plan: WindowPlan) -> None:
        self.averaging, self.plan = averaging, plan
        self.mesh = plan.layout.mesh
        self.own, self.out = plan.layout.box, plan.out.box
        self._exchanges: Exchanges | None = None

    def pool(self, x: Tensor) -> Tensor:
        """The shard [N, C, ...] of the result, from the shard of the input."""
        timers = self.mesh.timers
        exchanges = self.exchanges(x)
        halo = exchanges.halo
        pending = _start(halo, x)
        with timers.measure("compute"):
            y = self.averaging.means(x, self.own, self.out)
        if pending is None:
            return y
        slabs = exchanges.receive(halo, pending, x)
        with timers.measure("boundary"):
            for slab, box in zip(slabs, halo.slots, strict=True):
                self.averaging.means(slab, box, self.out, into=y)
        return y

    def spread(self, grad: Tensor, layer: str) -> Tensor:
        """The shard of dL/dx, from the shard of dL/dy; `layer` is for the timers."""
        timers = self.mesh.timers
        exchanges = self.exchanges(grad)
        grad_halo = exchanges.grad_halo
        pending = _start(grad_halo, grad)
        with timers.measure("compute", layer):
            grad_x = self.averaging.spread(grad, self.out, self.own)
        if pending is None:
            return grad_x
        slabs = exchanges.receive(grad_halo, pending, grad, layer)
        with timers.measure("boundary", layer):
            for slab, box in zip(slabs, grad_halo.slots, strict=True):
                self.averaging.spread(slab, box, self.own, into=grad_x)
        return grad_x

    def exchanges(self, x: Tensor) -> Exchanges:
        """Brings slabs of the input, and slabs of dL/dy to which this rank's inputs contributed.

        Collective the first time: the ranks agree on the order in which elements travel, that of
        their memory if it is channels-last on all of them. Other tensors are packed as well.
        """
        if self._exchanges is None:
            votes = torch.tensor([float(not x.numel() or _is_channels_last(x))])
            self.mesh.sample.all_reduce(votes, "min")
            self._exchanges = self.plan.exchanges(bool(votes))
        return self._exchanges


def average(x: Tensor, plan: AveragePlan) -> Tensor:
    """This rank's means over windows, differentiable to any order.

    The same node and the same exchanges on every rank, as all ranks have the same plan; an empty
    shard takes part.
    """
    return _Average.apply(x, plan)


class _Average(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AveragePlan) -> Tensor:
        ctx.plan, ctx.layer = plan, plan.mesh.timers.layer
        ctx.save_for_backward(exchange_marker())
        return plan.pool(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        begin_backward(ctx.plan.mesh)
        return _Spread.apply(grad, ctx.plan, ctx.layer), None


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, plan: AveragePlan, layer: str) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(exchange_marker())
        return plan.spread(grad, layer)

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors
        begin_backward(ctx.plan.mesh)
        return _Average.apply(x, ctx.plan), None, None


def _empty(box: Box, like: Tensor) -> Tensor:
    """A tensor for a box, in the memory format of `like`."""
    if not _is_channels_last(like):
        return like.new_empty(box.shape)
    n, channels, *spatial = box.shape
    return like.new_empty(n, *spatial, channels).movedim(-1, 1)


def _is_channels_last(x: Tensor) -> bool:
    return not x.is_contiguous() and x.permute(0, *range(2, x.dim()), 1).is_contiguous()


def _start(exchanger: Exchanger, x: Tensor) -> Pending | None:
    return None if exchanger.is_local else exchanger.start(x)


def _in_3d(x: Tensor) -> Tensor:
    """The same elements with three spatial dims, those that are missing in front."""
    for _ in range(5 - x.dim()):
        x = x.unsqueeze(2)
    return x


def _lo(box: Box) -> tuple[int, ...]:
    return (0,) * (5 - len(box.lo)) + tuple(box.lo[2:])
