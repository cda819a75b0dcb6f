"""Normalizes each sample by its own statistics: instance norm and group norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.backend.statistics import Moments, dense, unbiased
from pydist.errors import UsageError
from pydist.layout import Layout
from pydist.ops.channels import with_channels
from pydist.ops.dtypes import require_fitting
from pydist.ops.fusion.norm import normalized, take_input
from pydist.ops.norm.norm import AppliedNorm
from pydist.ops.norm.norm_common import (
    by_torch,
    evaluate,
    is_for_torch,
    one_value,
    parameters_for,
    update,
)
from pydist.ops.norm.norm_plan import Gathering, NormPlan, plan_norm
from pydist.ops.reduction.reduce import axes_of, in_full_precision
from pydist.tensor import ShardedTensor, implements, refusal, wrap

Running = tuple[Tensor | None, Tensor | None]


@implements(F.instance_norm)
def instance_norm(
    input: ShardedTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardedTensor:
    """Applies instance norm, with statistics per channel and sample.

    Running statistics are the mean over the samples of all sample groups. The memory format is
    kept; torch makes the result contiguous.
    """
    if not isinstance(input, ShardedTensor):
        raise refusal(F.instance_norm, (input, weight), {}, "the input is plain")
    layout = input.layout
    require_fitting(F.instance_norm, input, weight, bias)
    source, running = take_input(input), (running_mean, running_var)
    local = source.shard
    # Copies, as in torch: backward uses the weight of forward.
    scale, shift = parameters_for(weight, bias, layout)
    scale_shift = None if scale is None else scale.clone(), None if shift is None else shift.clone()
    if not use_input_stats:
        return evaluate(source, *running, *scale_shift, eps)
    voxels = math.prod(layout.shape[2:])
    if voxels == 1:
        raise one_value("spatial element", layout.shape)
    plan = _plan_of_samples(layout)
    tracked = running_mean is not None or running_var is not None
    holders = ("data", *layout.used_axes) if tracked else layout.used_axes
    if is_for_torch(local, layout.mesh.grid.size(holders)):
        if local.shape[0] > 1:
            normed = by_torch(F.instance_norm, local, *running, *scale_shift, True, momentum, eps)
        else:
            normed = _of_one_sample(local, running, _copied(scale_shift), momentum, eps)
        return wrap(normed, layout, input)
    local = dense(local)
    scale_shift = _copied(scale_shift)
    gathering = Gathering(local, plan)
    with torch.no_grad():
        own = gathering.merged()
        found = _mean_of_samples(own, local, plan, layout) if tracked and voxels else None
    result = normalized(AppliedNorm(local, *scale_shift, own, plan, eps), layout, source)
    if found is not None:
        # After the node is made, as in torch: if the norm is the last to save a tensor in a
        # checkpointed region, the recomputation ends there and does not update them again.
        with torch.no_grad():
            update(running, found, momentum, layout)
    return result


def _copied(parameters: Running) -> Running:
    """Copies scale and shift in autograd's graph, as torch's instance norm does per sample.

    Backward then uses the scale of forward even if the parameter changes, and all sample groups
    reach the two parameters in the same order.
    """
    scale, shift = (None if each is None else each.clone() for each in parameters)
    return scale, shift


def _of_one_sample(
    local: Tensor, running: Running, scale_shift: Running, momentum: float, eps: float
) -> Tensor:
    """Computes instance norm of one sample by torch's batch norm, which is equivalent.

    For one sample the gradient of torch's instance norm is wrong if dL/dy is channels-last (2.13,
    CPU). As in torch's instance norm, running statistics are updated after the node is made.
    """
    moved = [None if old is None else old.clone() for old in running]
    normed = by_torch(F.batch_norm, local, *moved, *scale_shift, True, momentum, eps)
    with torch.no_grad():
        for old, new in zip(running, moved, strict=True):
            if old is not None and new is not None:
                old.copy_(new)
    return normed


def _plan_of_samples(layout: Layout, members: int = 1) -> NormPlan:
    dims = range(2, len(layout.shape))
    return plan_norm(layout, dims, axes_of(layout, dims), per_sample=True, members=members)


def _mean_of_samples(
    own: Tensor, local: Tensor, plan: NormPlan, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Averages mean and unbiased variance [C] over all samples of all ranks."""
    shape, found = local.shape[:2], Moments(*own)
    sums = [rows.view(shape).sum(0) for rows in (found.mean, unbiased(found))]
    # Ranks that share the statistics together count each sample once. All ranks take part, so that
    # the result is bitwise equal on all.
    total = torch.cat([*sums, sums[0].new_full((1,), shape[0])]) / plan.ranks
    cut = axes_of(layout, [0, *range(2, len(layout.shape))])
    group = layout.mesh.group(("data", *cut))
    with layout.mesh.session.timers.measure("statistics"):
        group.all_reduce(total)
    mean, var = (total[:-1] / total[-1].clamp(min=1)).chunk(2)
    return mean, var


@implements(F.group_norm)
def group_norm(
    input: ShardedTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> ShardedTensor:
    """Applies group norm, with statistics per group of channels and sample."""
    if not isinstance(input, ShardedTensor):
        raise refusal(F.group_norm, (input, weight), {}, "the input is plain")
    layout = input.layout
    if len(layout.shape) < 2:
        raise refusal(F.group_norm, (input,), {}, "it needs channels")
    channels, split = layout.shape[1], layout.splits[1]
    if num_groups < 1 or channels % num_groups:
        raise UsageError(f"{channels} channels can't be divided into {num_groups} groups")
    members = channels // num_groups
    if split is not None and any(p % members for p in split.partition.points):
        input = with_channels(input, None)
        layout = input.layout
    if math.prod(layout.shape) == num_groups:
        raise one_value("value per channel", layout.shape)
    require_fitting(F.group_norm, input, weight, bias)
    plan = _plan_of_samples(layout, members)
    scale, shift = parameters_for(weight, bias, layout)
    source = take_input(input)
    local = source.shard
    if is_for_torch(local, layout.mesh.grid.size(layout.used_axes)):
        return wrap(F.group_norm(local, num_groups, scale, shift, eps), layout, input)
    dtype = in_full_precision(torch.group_norm, input, 1, shape=(1, 1, 2))
    local = dense(local.to(dtype or local.dtype))
    gathering = Gathering(local, plan)
    with torch.no_grad():
        own = gathering.merged()
    return normalized(AppliedNorm(local, scale, shift, own, plan, eps), layout, source)


@implements(torch.instance_norm)
def _torch_instance_norm(
    input: ShardedTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> ShardedTensor:
    return instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


@implements(torch.group_norm)
def _torch_group_norm(
    input: ShardedTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> ShardedTensor:
    return group_norm(input, num_groups, weight, bias, eps)
