"""Sums tensors over the sample groups of a batch, and gathers them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.errors import NotSupported, UsageError
from pydist.exchange.adjoints import all_reduce_sum
from pydist.group_sizes import weights_of
from pydist.tensor import ShardedTensor, local_of, wrap
from pydist.tensor.sharded import whole_of
from pydist.tensor.stage import StageTensor

if TYPE_CHECKING:
    from pydist.mesh import Mesh


def sum_over_groups(x: Tensor, mesh: Mesh) -> Tensor:
    """Sums a tensor over the sample groups, differentiably.

    A loss computed from such sums is the loss of the global batch, equal on all ranks, and the
    gradients of parameters are those of this loss:
    `sum_over_groups(losses.sum(), mesh) / sum_over_groups(weights.sum(), mesh)` is the mean that
    one device computes with class weights, ignored labels or a mask. Call it after (or within) the
    forward pass of the model, and before that of the next batch. Collective over the groups.
    Gradients of inputs and activations are those of one device times N / n, with N samples in all
    and n in this group, so the weighted mean over the groups is a parameter's true gradient.

    Args:
        x: plain or sharded, of the same shape in every group and equal on all ranks of a group.
        mesh: the mesh.

    Returns:
        A tensor of the shape of `x`; `x` itself with one group.

    Raises:
        UsageError: the groups' tensors have different shapes.
        NotSupported: the tensor is of a network in stages.
    """
    if mesh.data_size == 1:
        return x
    if isinstance(x, StageTensor):
        raise NotSupported(
            "sum_over_groups in the criterion of a network in stages: sum what divides the loss, "
            "such as the labels' weights, before pipe.step (docs/stages.md, Means over all groups)"
        )
    shapes = mesh.data.all_gather_bytes(repr(tuple(x.shape)).encode())
    if len(set(shapes)) > 1:
        given = ", ".join(shape.decode() for shape in shapes)
        raise UsageError(f"sum_over_groups of shapes {given}; equal shapes are possible")
    local = local_of(x) if isinstance(x, ShardedTensor) else x
    sizes = weights_of(mesh).batch_of([local.grad_fn])
    total = all_reduce_sum(local, mesh, ("data",), sizes=sizes)
    if sizes is not None and total.requires_grad:
        total.register_hook(lambda _: weights_of(mesh).reached(sizes))
    return wrap(total, x.layout, x) if isinstance(x, ShardedTensor) else total


def gather_over_groups(x: Tensor, mesh: Mesh) -> list[Tensor]:
    """Gathers a tensor of every sample group on all ranks, outside autograd's graph.

    Metrics that form sums over processes need it, as all ranks of a group hold the same batch:
    torchmetrics takes `dist_sync_fn=lambda x, group: pydist.gather_over_groups(x, mesh)`.
    Collective over all ranks.

    Args:
        x: plain or sharded, equal on all ranks of a group; groups may have other shapes.
        mesh: the mesh.

    Returns:
        One plain tensor per sample group, in their order, of the shape that it has there.

    Raises:
        UsageError: the groups' tensors have different dtypes or numbers of dims.
    """
    x = whole_of(x).detach()
    kinds = mesh.data.all_gather_bytes(repr((str(x.dtype), x.dim())).encode())
    if len(set(kinds)) > 1:
        given = ", ".join(kind.decode() for kind in kinds)
        raise UsageError(f"gather_over_groups of dtype and dims {given}; equal ones are possible")
    shapes = mesh.data.all_gather(torch.tensor(x.shape, dtype=torch.int64)).tolist()
    counts = [math.prod(shape) for shape in shapes]
    row = x.new_zeros(max(counts))
    row[: x.numel()] = x.flatten()
    rows = mesh.data.all_gather(row)
    return [
        row[:count].reshape(shape) for row, count, shape in zip(rows, counts, shapes, strict=True)
    ]
