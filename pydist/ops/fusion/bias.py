"""Adds a bias and applies a ReLU to a convolution's outputs, in place, in one pass.

On CUDA torch adds the bias of a convolution in a pass of its own over the outputs, as cuDNN's call
has none. There the convolution is run without, and the bias added with the ReLU behind it: one
pass instead of two. oneDNN adds it while it has the outputs in hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pydist.backend.statistics import Transform, apply, dense, per_channel
from pydist.backend.statistics import statistics_dtype as wide


def bias_behind(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """A copy of the bias, if it is to be added behind a convolution of x, and not by it.

    By then an optimizer may have changed the bias itself.
    """
    return bias.detach().clone() if bias is not None and x.is_cuda else None


def finish_(y: Tensor, bias: Tensor | None, negative_slope: float) -> None:
    """Adds a bias and applies a ReLU, in place; no graph knows of it.

    Args:
        y: [N, C, ...], may be empty.
        bias: [C] or `None`.
        negative_slope: of the ReLU; 1 for none.
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
    """A leaky ReLU in place; none for a slope of 1."""
    if negative_slope == 0.0:
        torch.relu_(x)
    elif negative_slope != 1.0:
        torch._C._nn.leaky_relu_(x, negative_slope)
