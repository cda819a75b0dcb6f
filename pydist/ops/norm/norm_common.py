"""Provides common parts of the norms: parameters, running statistics, evaluation, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.backend.statistics import dense
from pydist.errors import UsageError
from pydist.layout import Layout
from pydist.ops.channels import gather_channels, own_channels, parameter_of_channels
from pydist.ops.empty import with_elements, without_added
from pydist.ops.fusion.norm import Input, normalized
from pydist.ops.norm.norm import AppliedNorm
from pydist.ops.norm.norm_plan import plan_norm
from pydist.tensor import ShardedTensor, wrap

# Number of elements above which memory passes cost more than calls: pydist's norm takes 0.7 times
# torch's CPU time for forward and backward of 1 x 64 x 16^3 with a ReLU, 1.1 times for
# 1 x 320 x 8^3 (fp32).
_WORTH_A_PASS = 1 << 18


def parameters_for(
    weight: Tensor | None, bias: Tensor | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """Returns scale and shift of this rank's channels.

    Raises:
        UsageError: one of them does not have one value per channel.
    """
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and tuple(given.shape) != (layout.shape[1],):
            raise UsageError(
                f"a norm of {layout.shape[1]} channels got a {name} of shape {tuple(given.shape)}"
            )
    return parameter_of_channels(weight, layout), parameter_of_channels(bias, layout)


def evaluate(
    source: Input,
    mean: Tensor | None,
    var: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> ShardedTensor:
    """Applies a norm with given statistics of the channels; the memory format is kept.

    If no gradient is needed, a ReLU directly after the norm is computed in the same pass.
    """
    input, local = source.tensor, source.shard
    layout = input.layout
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (local, scale, shift)
    )
    is_large = local.device.type == "cpu" and local.numel() >= _WORTH_A_PASS
    for name, given in (("mean", mean), ("variance", var)):
        if given is not None and given.numel() != layout.shape[1]:
            raise UsageError(
                f"a norm of {layout.shape[1]} channels got a running {name} of shape "
                f"{tuple(given.shape)}"
            )
    mean, var = (None if each is None else own_channels(each, layout) for each in (mean, var))
    if mean is None or var is None or learns or not is_large:
        of_channels = [t if t is None else with_elements(t) for t in (mean, var, scale, shift)]
        normed = by_torch(F.batch_norm, with_elements(local), *of_channels, False, 0.0, eps)
        return wrap(without_added(normed, local.shape), layout, input)
    plan = plan_norm(layout, [0, *range(2, len(layout.shape))], ())
    values = [t.detach().double().flatten() for t in (mean, var)]
    known = torch.stack([torch.ones_like(values[0]), *values])
    norm = AppliedNorm(dense(local), scale, shift, known, plan, eps)
    return normalized(norm, layout, source)


def by_torch(norm: Callable[..., Tensor], local: Tensor, *args: Any) -> Tensor:
    """Applies torch's own batch or instance norm to a shard.

    On CPU its gradient is wrong if dL/dy has other strides than the result and dims of extent 1
    make its memory format ambiguous (torch 2.13): for a shard one voxel thick, or `F.instance_norm`
    of one sample with a channels-last gradient. So dL/dy is converted to the result's strides.
    """
    normed = norm(dense(local), *args)
    if normed.requires_grad:
        strides = normed.stride()
        normed.register_hook(lambda grad: _restrided(grad, strides))
    return normed


def _restrided(grad: Tensor | None, strides: tuple[int, ...]) -> Tensor | None:
    if grad is None or grad.stride() == strides:
        return grad
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


def is_for_torch(local: Tensor, holders: int) -> bool:
    """Returns whether torch's own function computes the norm, of data on `holders` ranks.

    If several ranks hold data, all of them have to run the same nodes. On a GPU torch uses cuDNN,
    against which pydist's norm has not been measured. On CPU torch is faster for small tensors, but
    adds up channels-last values one by one: with 4,096 fp32 values per channel, its error against
    fp64 is 10 to 20 times that of contiguous values, and up to 1,000 times in group norm.
    """
    is_small = local.device.type != "cpu" or local.numel() < _WORTH_A_PASS
    return holders == 1 and local.is_contiguous() and is_small


def update(
    running: tuple[Tensor | None, Tensor | None],
    found: tuple[Tensor, Tensor],
    momentum: float,
    layout: Layout,
) -> None:
    """Updates running mean and variance with new values of this rank's channels of a layout.

    Autograd does not see the update, as in torch's norms, whose nodes save these tensors.

    Args:
        running: running mean and variance, [C] each; `None` where there is none.
        found: the new mean and variance, [C of this rank].
        momentum: weight of the new values.
        layout: of the norm's input.
    """
    if layout.splits[1] is not None:
        mean, var = gather_channels(torch.stack(found), layout)
        found = mean, var
    for old, new in zip(running, found, strict=True):
        if old is not None:
            old.data.lerp_(new.to(old.dtype), momentum)


def one_value(of_what: str, shape: Sequence[int]) -> UsageError:
    """Returns torch's error for statistics of one value, which have no variance."""
    return UsageError(
        f"Expected more than 1 {of_what} when training, got input size {torch.Size(shape)}"
    )
