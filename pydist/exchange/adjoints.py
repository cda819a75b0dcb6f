"""Provides exchanges as autograd functions, in closed pairs of a map and its adjoint.

The convention for everything that users see: a gradient is the true one on every rank, whether the
tensor is cut, replicated on several ranks, or plain. For a parameter, only the *mean over all
ranks* of its gradients is the true one, as under DDP; the reducer forms that mean.

Between a result and a replicated operand, each of the operand's ranks has a part of the gradient:
there too, the mean over these ranks is the true one. The adjoints are

======================  =====================================================
forward                 backward
======================  =====================================================
identity (`scale_grad`) × a factor (replicas before / replicas after)
identity                mean over the ranks that hold the value
(`average_grad`)
sum over ranks          mean over the sample group, weighted sum over data groups
sum of a replicated     identity: a sharded tensor's gradient is the true one
sharded tensor
gather boxes            add back along the messages, × rep(A) / rep(B)
======================  =====================================================

and the backward of each right-hand side is the left-hand side *without* factors, except that the
mean is its own backward. So gradients that users see are true to second order.

Sample groups are weighted by their samples (`pydist.group_sizes`). Within a group, gradients are of
the group's own loss; they are weighted at parameters, and where gradients of several groups meet.

The mean is formed where a replicated tensor enters a call that uses its axes, on all their ranks
at the same point of backward. So tools that read gradients (hooks, `retain_grad`, `autograd.grad`)
never communicate, and may be used on one rank alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist.exchange.exchanger import in_memory
from pydist.exchange.function import ExchangeFunction, Function

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.exchange.exchanger import Exchanger
    from pydist.group_sizes import GroupSizes
    from pydist.mesh import Mesh


def _copy(x: Tensor) -> Tensor:
    return in_memory(x).clone(memory_format=torch.contiguous_format)


class _ScaleGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, as_view: bool) -> Tensor:
        ctx.factor = factor
        return x.view_as(x) if as_view else x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scaled_back(grad, ctx.factor), None, None


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return grad * factor

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, None]:
        return _ScaleGrad.apply(x, ctx.factor, False), None


def scale_grad(x: Tensor, factor: float, *, as_view: bool = False) -> Tensor:
    """Returns `x` unchanged, and multiplies its gradient by `factor` in backward.

    Args:
        x: a value with `factor` times as many replicas as the result that it enters.
        factor: replicas of `x` / replicas of the result.
        as_view: whether the result is a view, which torch does not allow to change in place. If
            not, its graph can be replaced (`pydist.gradients.aliases`).
    """
    if factor == 1 or not x.requires_grad or not torch.is_grad_enabled():
        return x
    return _ScaleGrad.apply(x, factor, as_view)


def is_scale_grad(node: Any) -> bool:
    """Returns whether `scale_grad` made a node of a graph."""
    return getattr(node, "_forward_cls", None) is _ScaleGrad


def scaled_back(grad: Tensor, factor: float) -> Tensor:
    """Computes the adjoint of `scale_grad` by itself; differentiable."""
    # Called for every parameter: without a graph, no node is made.
    return _Scale.apply(grad, factor) if torch.is_grad_enabled() else grad * factor


class _AllReduceSum(ExchangeFunction):
    part = "statistics"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Transport,
        weight: float,
        mesh: Mesh,
        sizes: GroupSizes | None,
    ) -> Tensor:
        ctx.mesh, ctx.args = mesh, (group, weight, mesh, sizes)
        total = _copy(x)
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Any, ...]:
        return _AllReduceMean.apply(grad, *ctx.args), None, None, None, None


class _AllReduceMean(ExchangeFunction):
    part = "statistics"

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        group: Transport,
        weight: float,
        mesh: Mesh,
        sizes: GroupSizes | None,
    ) -> Tensor:
        ctx.mesh, ctx.args = mesh, (group, weight, mesh, sizes)
        total = _copy(grad)
        enter_weighted_sum(total, sizes)
        group.all_reduce(total)
        leave_weighted_sum(total, sizes)
        return total.mul_(weight)

    @staticmethod
    def backward(ctx: Any, _: Any, x: Tensor) -> tuple[Any, ...]:
        return _AllReduceSum.apply(x, *ctx.args), None, None, None, None


def enter_weighted_sum(grad: Tensor, sizes: GroupSizes | None) -> None:
    """Weights a gradient, in place, before it is summed over sample groups.

    Within a group, gradients are of the group's own loss; the loss's weight in the mean over all
    samples is applied at the parameters. So where gradients of several groups' losses meet, each is
    weighted, and `leave_weighted_sum` divides the sum by this group's weight.
    """
    if sizes is not None and sizes.weight != 1:
        grad.mul_(sizes.weight)


def leave_weighted_sum(total: Tensor, sizes: GroupSizes | None) -> None:
    """Divides by this group's weight, in place; 0 for a group without samples."""
    if sizes is not None and sizes.weight != 1:
        total.mul_(1 / sizes.weight if sizes.weight else 0.0)


def all_reduce_sum(
    x: Tensor,
    mesh: Mesh,
    axes: tuple[str, ...],
    sizes: GroupSizes | None = None,
) -> Tensor:
    """Returns the sum of `x` over the ranks along `axes`, the same on all of them.

    With the data axis among `axes`, the adjoint sums over the sample groups, as the loss of each
    group depends on the result. It weights the groups by `sizes`, or equally.

    Args:
        x: this rank's summand; of equal shape and dtype on all ranks.
        mesh: the mesh.
        axes: names of its axes.
        sizes: samples of each group, with the data axis.
    """
    if mesh.grid.size(axes) == 1:
        return x
    return _AllReduceSum.apply(x, mesh.group(axes), 1.0 / _in_sample(mesh, axes), mesh, sizes)


class _SumParts(ExchangeFunction):
    part = "redistribute"

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.args = mesh, (mesh, axes)
        total = _copy(x)
        mesh.group(axes).all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Replicated.apply(grad, *ctx.args), None, None


class _Replicated(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.args = mesh, axes
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Any, ...]:
        return _SumParts.apply(x, *ctx.args), None, None


def sum_parts(x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Returns the sum of partial results over `axes`: the shard of a replicated sharded tensor.

    Its gradient is the true one on every rank, so that backward exchanges nothing.

    Args:
        x: this rank's partial result; of equal shape and dtype on all ranks.
        mesh: the mesh.
        axes: names of its axes.
    """
    return _SumParts.apply(x, mesh, axes) if mesh.grid.size(axes) > 1 else x


def average_back(grad: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Computes the adjoint of `all_reduce_sum` by itself, for a known sum; differentiable.

    Args:
        grad: dL/d(sum).
        mesh: the mesh.
        axes: names of its axes.
    """
    if mesh.grid.size(axes) == 1:
        return grad
    return _AllReduceMean.apply(grad, mesh.group(axes), 1.0 / _in_sample(mesh, axes), mesh, None)


def _in_sample(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Returns how many of the ranks along `axes` hold one sample."""
    size = mesh.grid.size(axes)
    return size // mesh.data_size if "data" in axes else size


class _MeanRanks(ExchangeFunction):
    part = "redistribute"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...], part: str, weight: float
    ) -> Tensor:
        ctx.mesh, ctx.args = mesh, (mesh, axes, part, weight)
        group = mesh.group(axes)
        # The mean loss of an empty batch is NaN, which a weight of 0 would keep.
        total = _copy(x) if weight else _copy(x).zero_()
        if weight != 1:
            total.mul_(weight)
        group.all_reduce(total)
        return total.div_(group.size)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Any, ...]:
        return _MeanRanks.apply(grad, *ctx.args), None, None, None, None


def mean_ranks(
    x: Tensor,
    mesh: Mesh,
    axes: tuple[str, ...],
    part: str = "redistribute",
    weight: float = 1.0,
) -> Tensor:
    """Returns the weighted mean over the ranks along `axes`; it is its own adjoint.

    Turns a gradient whose mean over these ranks is the true one into the true one.

    Args:
        x: this rank's value; of equal shape and dtype on all ranks.
        mesh: the mesh.
        axes: names of its axes.
        part: the part of the step to which the time counts; see `pydist.timers`.
        weight: of this rank's value; the sum is divided by the number of ranks, not by the weights.
    """
    return _MeanRanks.apply(x, mesh, axes, part, weight) if mesh.grid.size(axes) > 1 else x


class _TrueGradient(ExchangeFunction):
    part = None  # `mean_ranks` measures

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.args = mesh, (mesh, axes)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Any, ...]:
        return mean_ranks(grad, *ctx.args), None, None


def average_grad(x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Returns `x`, replicated along `axes`, as the operand of a call that differs between them.

    Its gradient becomes the mean over these ranks, with one all-reduce of its size in backward.

    Args:
        x: equal on all ranks along `axes`.
        mesh: the mesh.
        axes: names of its axes.
    """
    if not x.requires_grad or mesh.grid.size(axes) == 1:
        return x
    return _TrueGradient.apply(x, mesh, axes)


class _Gather(ExchangeFunction):
    part = "halo"

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        exchanger: Exchanger,
        weight: float,
        mesh: Mesh,
        part: str,
    ) -> Tensor:
        ctx.mesh, ctx.args = mesh, (exchanger, weight, mesh, part)
        slot = exchanger.empty_slots(local)[0].zero_()
        exchanger.gather(local, [slot])
        return slot

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Any, ...]:
        return _AddBack.apply(grad, *ctx.args), None, None, None, None


class _AddBack(ExchangeFunction):
    part = "halo"

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, exchanger: Exchanger, weight: float, mesh: Mesh, part: str
    ) -> Tensor:
        ctx.mesh, ctx.args = mesh, (exchanger, weight, mesh, part)
        local = exchanger.empty_shard(grad).zero_()
        exchanger.add_back([grad], local)
        return local if weight == 1 else local.mul_(weight)

    @staticmethod
    def backward(ctx: Any, _: Any, x: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(x, *ctx.args), None, None, None, None


def gather_box(
    local: Tensor,
    exchanger: Exchanger,
    mesh: Mesh,
    *,
    weight: float = 1.0,
    part: str = "halo",
) -> Tensor:
    """Gathers the one box that this rank needs from its owners; 0 outside the global domain.

    Args:
        local: this rank's shard.
        exchanger: with one slot per rank; its memory format is that of the result.
        mesh: for the timers and the end of backward.
        weight: rep(A) / rep(B) of a redistribution from layout A to layout B; 1 for halos.
        part: name under which the time is counted.
    """
    if local.is_complex():
        real, imaginary = (
            gather_box(each, exchanger, mesh, weight=weight, part=part)
            for each in (local.real, local.imag)
        )
        return torch.complex(real, imaginary)
    return _Gather.apply(local, exchanger, weight, mesh, part)


def add_boxes(box: Tensor, exchanger: Exchanger, mesh: Mesh) -> Tensor:
    """Adds each rank's box to the shards of the owners; the adjoint of `gather_box`.

    Args:
        box: this rank's contribution, on the one box that `exchanger` gathers.
        exchanger: with one slot per rank; its memory format is that of the result.
        mesh: for the timers and the end of backward.
    """
    return _AddBack.apply(box, exchanger, 1.0, mesh, "redistribute")
