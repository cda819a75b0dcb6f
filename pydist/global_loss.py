"""Sums tensors over the sample groups of a batch, gathers them, and compares closures."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pydist.errors import NotSupported, UsageError
from pydist.exchange.adjoints import all_reduce_sum
from pydist.group_sizes import GroupSizes, weights_of
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


_models: list[tuple[weakref.ref[nn.Module], Mesh]] = []
"""Models that are trained on several sample groups."""
_lock = threading.Lock()


def agree_on_closures_of(model: nn.Module, mesh: Mesh) -> None:
    """Passes the loss of the global batch to optimizers that depend on a closure's loss.

    A line search (LBFGS) compares losses. The groups' losses differ, so ranks would take different
    steps. The mean over the groups, weighted like gradients, is the same on all ranks.
    """
    with _lock:
        if not _models:
            register_optimizer_step_pre_hook(_before_step)
        alive = [known for known in _models if known[0]() is not None]
        _models[:] = [*alive, (weakref.ref(model), mesh)]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    place = "closure" if "closure" in kwargs else 1
    closure = kwargs.get("closure") if place == "closure" else args[1] if len(args) > 1 else None
    if closure is None or not _decides(optimizer):
        return None
    mesh = _mesh_of(optimizer)
    if mesh is None:
        return None
    agreed = _agreed(closure, mesh)
    if place == "closure":
        return args, {**kwargs, "closure": agreed}
    return (args[0], agreed, *args[2:]), kwargs


def _decides(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer may use the loss; torch's own, except LBFGS, only return it."""
    home = type(optimizer).step.__module__
    return isinstance(optimizer, LBFGS) or not home.startswith(("torch.optim.", "pydist."))


def _mesh_of(optimizer: Optimizer) -> Mesh | None:
    """Returns the mesh of a model that the optimizer steps."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    with _lock:
        known = [(reference(), mesh) for reference, mesh in _models]
    for model, mesh in known:
        if model is not None and any(id(p) in stepped for p in model.parameters()):
            return mesh
    return None


def _agreed(closure: Callable[[], Any], mesh: Mesh) -> Callable[[], Any]:
    def evaluate() -> Any:
        weights = weights_of(mesh)
        seen: list[GroupSizes] = []
        weights.seen = seen
        try:
            loss = closure()
        finally:
            weights.seen = None
        if loss is None:
            return None
        if any(not sizes.weighs_as(seen[0]) for sizes in seen):
            raise NotSupported(
                "a closure whose batches the sample groups share differently, as "
                f"{' and '.join(str(list(sizes.shares)) for sizes in seen)}: return the loss of "
                "the whole batch, formed with pydist.sum_over_groups, and parallelize with "
                'group_weight="equal"'
            )
        with torch.no_grad():
            weight = seen[0].weight if seen else 1.0
            value = loss.item() if isinstance(loss, Tensor) else float(loss)
            # The mean loss of an empty batch is NaN.
            mine = torch.tensor([weight and weight * value], dtype=torch.float64)
            mesh.data.all_reduce(mine)
            mean = float(mine) / mesh.data_size
            return torch.full_like(loss, mean) if isinstance(loss, Tensor) else mean

    return evaluate
