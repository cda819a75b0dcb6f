"""Normalizes over trailing dims: layer norm and RMS norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.backend.statistics import dense, statistics_dtype
from pydist.errors import UsageError
from pydist.ops.dtypes import require_fitting
from pydist.ops.empty import with_elements, without_added
from pydist.ops.norm.norm import AppliedNorm
from pydist.ops.norm.norm_plan import Gathering, plan_norm
from pydist.ops.reduction.reduce import axes_of, in_full_precision
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap
from pydist.tensor.operands import operand_for, parameter_for


@implements(F.layer_norm)
def layer_norm(
    input: ShardedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> ShardedTensor:
    """Applies layer norm over trailing dims, which may be split."""
    return _norm(F.layer_norm, input, normalized_shape, (weight, bias), eps)


@implements(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: ShardedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> ShardedTensor:
    """Applies RMS norm over trailing dims, which may be split."""
    return _norm(F.rms_norm, input, normalized_shape, (weight,), eps)


def _norm(
    function: Callable[..., Tensor],
    input: ShardedTensor,
    normalized_shape: Sequence[int],
    affine: tuple[Tensor | None, ...],
    eps: float | None,
) -> ShardedTensor:
    if not isinstance(input, ShardedTensor):
        raise refusal(function, (input, *affine), {}, "the input is plain")
    layout, normalized = input.layout, tuple(normalized_shape)
    first = len(layout.shape) - len(normalized)
    if not normalized or first < 0 or layout.shape[first:] != normalized:
        raise UsageError(
            f"{function.__name__} over {normalized} does not fit a tensor of shape {layout.shape}"
        )
    for given in affine:
        if given is not None and tuple(given.shape) != normalized:
            raise UsageError(
                f"{function.__name__} over {normalized} got parameters of shape "
                f"{tuple(given.shape)}"
            )
    if function is F.layer_norm:  # torch's RMS norm promotes
        require_fitting(function, input, *affine)
    dims = range(first, len(layout.shape))
    axes = axes_of(layout, dims)
    local = local_of(input)
    dtype = in_full_precision(function, input, (2,)) or local.dtype
    if layout.mesh.grid.size(axes) == 1:
        operands = [parameter_for(t, layout) for t in affine]
        normed = function(with_elements(local), normalized, *operands, eps)
        return wrap(without_added(normed, local.shape), layout, input)
    # With scale and shift, narrow dtypes are rounded once, after both.
    local = local.to(statistics_dtype(dtype) if any(t is not None for t in affine) else dtype)
    if eps is None:
        eps = torch.finfo(statistics_dtype(local.dtype)).eps
    rows = dense(local.reshape(1, math.prod(local.shape[:first]), math.prod(local.shape[first:])))
    plan = plan_norm(layout, dims, axes)
    gathering = Gathering(rows, plan)
    operands = [None if t is None else operand_for(t, layout, layout.shape) for t in affine]
    with torch.no_grad():
        own = gathering.merged()
    centered = function is F.layer_norm
    normed = AppliedNorm(rows, None, None, own, plan, eps, centered).result()
    return wrap(_scaled(normed.view(local.shape), operands).to(dtype), layout, input)


def _scaled(x: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
    """Multiplies by the first operand and adds the second, broadcast over the leading dims."""
    scale, shift = (*operands, None)[:2]
    if scale is not None and shift is not None:
        return torch.addcmul(shift, x, scale)
    if scale is not None:
        return x * scale
    return x if shift is None else x + shift


@implements(torch.layer_norm)
def _torch_layer_norm(
    input: ShardedTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ShardedTensor:
    return layer_norm(input, normalized_shape, weight, bias, eps)
