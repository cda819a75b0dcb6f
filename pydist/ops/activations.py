"""In-place ReLUs and PReLU, fused with neighboring calls where `pydist.ops.fusion` can."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.ops.channels import parameter_of_channels
from pydist.ops.fusion.norm import parametric
from pydist.ops.fusion.relu import relu_in_place
from pydist.ops.pointwise.elementwise import elementwise
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap
from pydist.tensor.operands import parameter_for


@implements(F.relu)
def relu(input: Tensor, inplace: bool = False) -> Any:
    """Applies ReLU, as `F.relu`."""
    return relu_(input) if inplace else elementwise(torch.relu, input)


@implements(torch.relu_, torch.Tensor.relu_)
def relu_(input: Tensor) -> Any:
    """Applies ReLU in place."""
    assert isinstance(input, ShardedTensor)  # the only argument
    fused = relu_in_place(input, 0.0)
    return elementwise(torch.relu_, input) if fused is None else fused


@implements(F.leaky_relu)
def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Applies leaky ReLU, as `F.leaky_relu`."""
    if inplace:
        return leaky_relu_(input, negative_slope)
    return elementwise(torch._C._nn.leaky_relu, input, negative_slope)


@implements(torch._C._nn.leaky_relu_)
def leaky_relu_(input: Tensor, negative_slope: float = 0.01) -> Any:
    """Applies leaky ReLU in place."""
    assert isinstance(input, ShardedTensor)
    fused = relu_in_place(input, negative_slope)
    if fused is None:
        return elementwise(torch._C._nn.leaky_relu_, input, negative_slope)
    return fused


@implements(torch.prelu, F.prelu, torch.Tensor.prelu)
def prelu(input: Tensor, weight: Tensor) -> ShardedTensor:
    """Applies PReLU; the weight has one entry per channel (dim 1), or a single one."""
    if not isinstance(input, ShardedTensor):
        raise refusal(torch.prelu, (input, weight), {}, "the weight is sharded, the input is not")
    layout = input.layout
    has_channels = weight.dim() == 1 and weight.numel() > 1 and input.dim() > 1
    own = (parameter_of_channels if has_channels else parameter_for)(weight, layout)
    # A view, as in torch: backward does not notice if the parameter's memory is replaced.
    fused = parametric(input, own.flatten().view(-1))
    if fused is not None:
        return wrap(fused, layout, input)
    return wrap(torch.prelu(local_of(input), own), layout, input)
