"""Batch norm of sharded tensors, with the statistics that one device would see."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.comm.adjoints import enter, sum_ranks
from pydist.errors import UsageError
from pydist.layout import Layout
from pydist.ops.redistribute import parameter_for
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap

STATISTICS = ("global", "group", "rank")


@implements(F.batch_norm)
def batch_norm(
    input: ShardedTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardedTensor:
    """Batch norm over all voxels and samples of a channel.

    The statistics span all ranks ("global": all sample groups too, as on one device with the
    whole batch), the sample group ("group"), or this rank alone ("rank"). They are formed in two
    passes, so that nothing cancels.
    """
    local, layout = local_of(input), input._layout
    if layout.splits[1] is not None:
        raise refusal(F.batch_norm, (input,), {}, "the channels are split")
    scale, shift = parameter_for(weight, layout), parameter_for(bias, layout)
    if not training:
        return wrap(
            _evaluate(local, running_mean, running_var, scale, shift, eps, layout), layout, input
        )
    normed, mean, var, count = _normalise(local, layout, input._origin.statistics, eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = var * (count / max(1, count - 1))
            if input._origin.statistics != "global":
                mean, unbiased = _mean_over_ranks(mean, unbiased, count, layout)
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    if scale is not None:
        normed = normed * _per_channel(scale, local.dim())
    if shift is not None:
        normed = normed + _per_channel(shift, local.dim())
    return wrap(normed.to(local.dtype), layout, input)


def _evaluate(
    local: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    layout: Layout,
) -> Tensor:
    """Batch norm with given statistics."""
    if mean is None or var is None or not any(box.empty for box in layout.boxes):
        return F.batch_norm(local, mean, var, scale, shift, False, 0.0, eps)
    # torch's own call gives an empty rank gradients without a graph: the others would wait for it
    # in a second backward.
    out = (local - _per_channel(mean, local.dim())) * _per_channel(
        torch.rsqrt(var + eps), local.dim()
    )
    if scale is not None:
        out = out * _per_channel(scale, local.dim())
    return out if shift is None else out + _per_channel(shift, local.dim())


def _normalise(
    local: Tensor, layout: Layout, statistics: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(x - mean) / sqrt(var + eps), with the mean, the variance and the count behind them."""
    mesh = layout.mesh
    axes = _axes(layout, statistics)
    copies = 1.0
    if statistics != "rank":
        # The statistics are replicated over the sample group, the shard `replicas` times.
        copies = mesh.sample_size / layout.replicas
    over = [d for d in range(local.dim()) if d != 1]
    if local.dtype in (torch.float16, torch.bfloat16):
        local = local.float()
    count = _count(local, layout, statistics)
    if count == 1:
        raise UsageError(
            "batch norm in training needs more than one value a channel, but the input is "
            f"{layout.shape}"
        )
    divisor = max(1, count)
    mean = sum_ranks(local.sum(over), mesh, axes) / divisor
    centred = local - _per_channel(enter(mean, copies), local.dim())
    var = sum_ranks((centred * centred).sum(over), mesh, axes) / divisor
    inverse = enter(torch.rsqrt(var + eps), copies)
    return centred * _per_channel(inverse, local.dim()), mean, var, count


def _axes(layout: Layout, statistics: str) -> tuple[str, ...]:
    if statistics == "rank":
        return ()
    used = tuple(a for s in layout.splits if s for a in s.axes)
    return ("data", *used) if statistics == "global" else used


def _count(local: Tensor, layout: Layout, statistics: str) -> int:
    """Values a channel behind the statistics."""
    if statistics == "rank":
        return local.numel() // max(1, local.shape[1])
    count = math.prod(layout.shape) // max(1, layout.shape[1])
    mesh = layout.mesh
    if statistics == "global" and mesh.data_size > 1:
        # Groups may hold unequal numbers of samples: a short last batch.
        total = torch.tensor([count], dtype=torch.int64)
        with mesh.timers.measure("statistics"):
            mesh.data.all_reduce(total)
        count = int(total)
    return count


def _per_channel(x: Tensor, dims: int) -> Tensor:
    return x.view(1, -1, *(1 for _ in range(dims - 2)))


def _mean_over_ranks(
    mean: Tensor, var: Tensor, count: int, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The mean of differing statistics over the ranks that have any.

    The running statistics then are equal on all ranks at any time, so that evaluation and
    checkpoints need not ask when they were last averaged.
    """
    mesh, channels = layout.mesh, mean.numel()
    packed = torch.cat([mean, var, mean.new_ones(1)]) * float(count > 0)
    with mesh.timers.measure("statistics"):
        mesh.world.all_reduce(packed)
    packed = packed / packed[-1]
    return packed[:channels], packed[channels:-1]
