"""Applies bias and ReLU to a convolution's outputs, in place and in one pass.

On CUDA torch adds the bias of a convolution in a separate pass over the outputs, as the cuDNN call
has no bias. There the convolution runs without its bias, which is added together with the ReLU:
one pass instead of two. oneDNN adds the bias while it computes the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pydist.backend.statistics import Transform, apply, dense, per_channel
from pydist.backend.statistics import statistics_dtype as wide


def deferred_bias(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns a copy of the bias if it is added after a convolution of x, not by the convolution.

    It is a copy because an optimizer may change the bias before it is added.
    """
    return bias.detach().clone() if bias is not None and x.is_cuda else None


def finish_(y: Tensor, bias: Tensor | None, negative_slope: float) -> None:
    """Adds a bias and applies a ReLU, in place and outside of autograd's graph.

    Args:
        y: [N, C, ...], may be empty.
        bias: [C] or `None`.
        negative_slope: of the ReLU; 1 for no ReLU.
    """
    with torch.no_grad():
        if bias is None:
            leaky_relu_(y, negative_slope)
        elif dense(y) is not y:
            leaky_relu_(y.add_(per_channel(bias, y)), negative_slope)
        elif y.numel():
            # (y - 0) 1 + bias
            values = torch.zeros(3, len(bias), dtype=wide(y.dtype), device=y.device)
            values[1] = 1.0
            values[2] = bias
            apply(y, y, Transform(values, negative_slope))


def leaky_relu_(x: Tensor, negative_slope: float) -> None:
    """Applies a leaky ReLU in place; does nothing for a slope of 1."""
    if negative_slope == 0.0:
        torch.relu_(x)
    elif negative_slope != 1.0:
        torch._C._nn.leaky_relu_(x, negative_slope)
