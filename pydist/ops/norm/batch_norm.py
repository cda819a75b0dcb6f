"""Computes batch norms of sharded tensors, with the statistics of a single-device run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.backend.statistics import Moments, dense, merged, unbiased
from pydist.errors import UsageError
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
from pydist.ops.reduction.reduce import axes_of
from pydist.tensor import ShardedTensor, implements, refusal, wrap

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
    """Applies batch norm over all voxels and samples of a channel.

    The statistics span all ranks and sample groups, as on one device with the global batch
    ("global"), the sample group ("group"), or this rank only ("rank").
    """
    if not isinstance(input, ShardedTensor):
        raise refusal(F.batch_norm, (input, weight), {}, "the input is plain")
    layout, over = input.layout, input._origin.statistics
    require_fitting(F.batch_norm, input, weight, bias)
    if eps < 0 or (training and eps == 0):  # as torch
        possible = "positive during training" if training else "non-negative"
        raise UsageError(f"batch_norm eps must be {possible}, but got {eps}")
    source = take_input(input)
    local = source.shard
    running = (running_mean, running_var)
    if not training:
        return evaluate(source, *running, *parameters_for(weight, bias, layout), eps)
    dims = [0, *range(2, len(layout.shape))]
    cut = axes_of(layout, dims)
    plan = plan_norm(layout, dims, _axes(cut, over))
    tracked = running_mean is not None or running_var is not None
    # Running statistics are always equal on all ranks, so that evaluation and checkpoints need no
    # averaging. The same exchange transfers them.
    everyone = plan_norm(layout, dims, _axes(cut, "global")) if tracked else plan
    if layout.splits[1] is None and is_for_torch(local, everyone.ranks):
        affine = parameters_for(weight, bias, layout)
        normed = by_torch(F.batch_norm, local, *running, *affine, True, momentum, eps)
        return wrap(normed, layout, input)
    local = dense(local)
    gathering = Gathering(local, everyone)
    affine = parameters_for(weight, bias, layout)
    with torch.no_grad():
        own, others = _merged(gathering, plan, everyone, over)
        counts = plan_norm(layout, dims, cut).counts
        if over == "rank" and 1 in counts:
            raise one_value("value per channel", layout.boxes[counts.index(1)].shape)
        # Only then does it depend on other sample groups, and is worth a read from the device.
        few = sum(counts) <= 1
        if few and over != "rank" and float(own[0, 0]) == 1:
            raise one_value("value per channel", layout.shape)
        if not few or others.n.any():
            update(running, _averaged(others), momentum, layout)
    sizes = input._origin.sizes if over == "global" else None
    return normalized(AppliedNorm(local, *affine, own, plan, eps, sizes=sizes), layout, source)


def _axes(cut: tuple[str, ...], over: str) -> tuple[str, ...]:
    if over == "rank":
        return ()
    return ("data", *cut) if over == "global" else cut


def _merged(
    gathering: Gathering, plan: NormPlan, everyone: NormPlan, over: str
) -> tuple[Tensor, Moments]:
    """Returns this rank's statistics [3, R], and the statistics [k, R] of all ranks."""
    if everyone is plan:
        own = gathering.merged()
        return own, Moments(*own.unsqueeze(1))
    parts = gathering.wait()
    parts = parts._replace(n=parts.n.expand_as(parts.mean))
    if over == "rank":
        return torch.stack([part[everyone.group.rank] for part in parts]), parts
    mesh = plan.mesh
    shape = mesh.data_size, -1, parts.mean.shape[1]
    by_group = (part.reshape(shape).transpose(0, 1).flatten(1) for part in parts)
    groups = merged(Moments(*by_group)).view(3, *shape[::2])
    return groups[:, mesh.data_index].contiguous(), Moments(*groups)


def _averaged(statistics: Moments) -> tuple[Tensor, Tensor]:
    """Averages mean and unbiased variance over the nonempty ones of the statistics [k, ...]."""
    used = (statistics.n > 0).to(statistics.n.dtype)
    share = used / used.sum(0).clamp(min=1)
    return (statistics.mean * share).sum(0), (unbiased(statistics) * share).sum(0)


@implements(torch.batch_norm)
def _torch_batch_norm(
    input: ShardedTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> ShardedTensor:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
