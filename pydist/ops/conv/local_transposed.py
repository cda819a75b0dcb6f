"""Computes transposed convolutions of a rank's own tensor, without communication.

It is the adjoint of a convolution: its forward is the convolution's dgrad, its dL/dx the
convolution's forward, and its dL/dweight the convolution's wgrad with swapped operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.backend.conv_kernels import ConvKernels
from pydist.exchange.function import Function
from pydist.exchange.left_weights import LeftWeight, out_of_graph
from pydist.mesh import Mesh
from pydist.ops.conv.local_conv import (
    ConvChooser,
    apart,
    bias_gradient,
    shard_gradients,
    with_bias,
    with_dims,
)
from pydist.tensor.aliasing import as_result


class _LocalTransposed(Function):
    boxed_grads_call = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernels: ConvKernels,
        mesh: Mesh,
        starts: Sequence[int],
        extents: Sequence[int],
        left: LeftWeight | None,
    ) -> Tensor:
        ctx.kernels, ctx.mesh, ctx.left = kernels, mesh, left
        ctx.starts, ctx.extents = starts, extents
        ctx.save_for_backward(x, weight)  # not the bias, which may change, as in torch
        with mesh.session.timers.measure("convolution"):
            y = kernels.run_transposed(x, with_dims(weight, x), bias)
            y = kernels.in_format(_cut(y, starts, extents))
            # torch allows no in-place change of a view made in an autograd function.
            return y.clone() if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        kernels: ConvKernels = ctx.kernels
        p = kernels.problem
        if torch.is_grad_enabled():
            x, weight = ctx.saved_tensors
            left: LeftWeight | None = ctx.left
            weight = weight if left is None else left.weight
            starts = [start + q for start, q in zip(ctx.starts, p.padding, strict=True)]
            attributes = p.stride, p.dilation, p.groups, starts, ctx.extents
            x, weight = apart(x, weight, ctx.needs_input_grad)
            y = transposed_by_torch(x, with_dims(weight, x), *attributes)
            found = with_bias(y, (x, weight), ctx.needs_input_grad, grads[0])
            return (*found, *(None,) * 5)
        grad = kernels.in_format(grads.pop())
        grad_bias = bias_gradient(grad) if ctx.needs_input_grad[2] else None
        grad = kernels.in_format(_uncut(grad, ctx.starts, p.input[2:]))
        own = shard_gradients(
            ctx,
            lambda x, kernel: kernels.run_forward(grad, kernel, None),
            lambda x, kernel: kernels.run_wgrad(grad, x, kernel),
            frees=True,
        )
        return *own, grad_bias, *(None,) * 5


def transposed_by_torch(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    starts: Sequence[int],
    extents: Sequence[int],
) -> Tensor:
    """Computes an interval of a transposed convolution by torch, for double backward.

    As in `unpadded_conv`, it runs without bias, without padding and not in narrow dtypes, with
    which oneDNN's gradients may be wrong. The result is cut afterwards.

    Args:
        x: [N, Ci, ...].
        weight: [Ci, Co / groups, ...].
        stride: one number per spatial dim.
        dilation: one number per spatial dim.
        groups: of the channels.
        starts: first index of the interval, per spatial dim, in the result without padding.
        extents: of the interval, per spatial dim.
    """
    if x.dtype.itemsize < 4:
        attributes = stride, dilation, groups, starts, extents
        return transposed_by_torch(x.float(), weight.float(), *attributes).to(x.dtype)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    reached = [(n - 1) * s + span for n, s, span in zip(x.shape[2:], stride, spans, strict=True)]
    ends = [start + n for start, n in zip(starts, extents, strict=True)]
    beyond = [max(0, end - n) for end, n in zip(ends, reached, strict=True)]
    none = (0,) * len(starts)
    y = torch.convolution(x, weight, None, stride, none, dilation, True, beyond, groups)
    return _cut(y, starts, extents)


def _cut(y: Tensor, starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Returns an interval of each spatial dim."""
    for dim, (start, extent) in enumerate(zip(starts, extents, strict=True), start=2):
        if extent != y.shape[dim]:
            y = y.narrow(dim, start, extent)
    return y


def _uncut(grad: Tensor, starts: Sequence[int], whole: Sequence[int]) -> Tensor:
    """Computes the adjoint of `_cut`, in the same memory format."""
    sizes = zip(starts, grad.shape[2:], whole, strict=True)
    beyond = [(start, n - start - extent) for start, extent, n in sizes]
    if not any(map(any, beyond)):
        return grad
    return F.pad(grad, [n for pair in reversed(beyond) for n in pair])


def local_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chooser: ConvChooser,
    mesh: Mesh,
    starts: Sequence[int],
    extents: Sequence[int],
) -> Tensor:
    """Computes an interval of a rank-local transposed convolution.

    Args:
        x: [N, Ci, ...] with one to three spatial dims.
        weight: [Ci, Co / groups, ...].
        bias: [Co] or `None`.
        chooser: of the adjoint convolution; with one spatial dim, of the 2D one with a dim of 1
            before it.
        mesh: the mesh.
        starts: first output to return, per spatial dim.
        extents: number of outputs to return, per spatial dim.

    Returns:
        [N, Co, *extents], channels-last where that was chosen.
    """
    if x.dim() == 3:
        wanted = (0, *starts), (1, *extents)
        y = local_transposed(x.unsqueeze(2), weight, bias, chooser, mesh, *wanted)
        return as_result(y.squeeze(2))
    kernels = chooser.kernels_ahead(x, weight)
    # Outside of the autograd function, which must save its own inputs.
    x = kernels.in_format(x)
    weight, left = out_of_graph(mesh, x, weight)
    return _LocalTransposed.apply(x, weight, bias, kernels, mesh, starts, extents, left)
