"""Converts tensors to a call's operands: from other layouts, plain tensors and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from pydist.errors import UsageError
from pydist.exchange.adjoints import average_grad, scale_grad
from pydist.exchange.consistency import consistency_of
from pydist.exchange.own_slice import is_sharded_weight
from pydist.exchange.redistribution import redistributed
from pydist.interop import ArrayLike, as_tensor
from pydist.layout import Layout, layout_for_sample
from pydist.mesh import Mesh
from pydist.tensor.aliasing import detached_part, is_partly_changed, remember_plain
from pydist.tensor.handlers import observer
from pydist.tensor.sharded import ShardedTensor, local_of, wrap
from pydist.tensor.wrapper import plain


def redistribute(x: ShardedTensor, layout: Layout) -> ShardedTensor:
    """Returns the same global tensor in another layout; see `pydist.exchange.redistribution`.

    Raises:
        UsageError: the layout has another shape or another mesh.
    """
    local = local_of(x)
    return x if x.layout == layout else wrap(redistributed(local, x.layout, layout), layout, x)


def distribute_tensor(
    tensor: ArrayLike,
    mesh: Mesh,
    dims: Mapping[int, str] | None = None,
    first_sample: int | None = None,
) -> ShardedTensor:
    """Cuts a tensor that is equal on all ranks of the sample group.

    Differentiable: the gradient that reaches `tensor` is the true one, equal on all ranks.

    Args:
        tensor: the full tensor, or an array of another library (see `pydist.interop`), equal on
            all ranks of the group; checksums verify it in every step.
        mesh: the mesh.
        dims: which dim is cut along which mesh axis; by default that of its name, of
            [N, C, D, H, W], images [N, C, H, W] and lines [N, C, W]; {} cuts none.
        first_sample: as of `ShardedTensor.from_local`.

    Raises:
        UsageError: the ranks of the group hold different tensors, or `dims` does not fit.
    """
    tensor = as_tensor(tensor)
    layout = layout_for_sample(mesh, tensor.shape, dims)
    own = plain(tensor)
    x = ShardedTensor.of_shard(shard_of_plain(own, layout), layout, first_sample)
    if x._shard is not own:
        remember_plain(x, tensor)
    return x


def shard_of_plain(tensor: Tensor, layout: Layout) -> Tensor:
    """Returns this rank's part of a plain tensor that has the global shape of `layout`.

    The gradient that reaches `tensor` is the true one, parameter or not.

    Raises:
        UsageError: the ranks of the sample group hold different tensors.
    """
    prove_equal(tensor, layout, "cut")
    observer.follow(tensor, layout.mesh)
    part = average_grad(tensor, layout.mesh, layout.used_axes)
    if layout.local_shape != tuple(tensor.shape):
        part = part[layout.box.slices]
    entered = scale_grad(part, layout.mesh.sample_size / layout.replicas, as_view=True)
    return detached_part(entered, tensor)


def shard_in(tensor: Tensor, layout: Layout) -> Tensor:
    """Returns this rank's part, in `layout`, of a plain tensor or of one in any layout.

    Raises:
        RuntimeError: a plain tensor does not have the global shape.
    """
    if isinstance(tensor, ShardedTensor):
        return local_of(redistribute(tensor, layout))
    refuse_shard_shaped(tensor, layout)
    if tuple(tensor.shape) != layout.shape:
        raise RuntimeError(
            f"Mismatch in shape: a gradient of shape {list(tensor.shape)} is given for a tensor of "
            f"shape {list(layout.shape)}"
        )
    return shard_of_plain(tensor, layout)


@overload
def parameter_for(tensor: Tensor, layout: Layout, target: Layout | None = None) -> Tensor: ...
@overload
def parameter_for(
    tensor: Tensor | None, layout: Layout, target: Layout | None = None
) -> Tensor | None: ...
def parameter_for(
    tensor: Tensor | None, layout: Layout, target: Layout | None = None
) -> Tensor | None:
    """Returns the weight of a layer, or the part of it with which this rank computes.

    Args:
        tensor: the weight; plain ones are parameters of all ranks.
        layout: layout of the layer's result, or of its input if that uses more axes.
        target: layout in which the weight is needed; by default every rank needs all of it.
    """
    if tensor is None:
        return None
    use_weight(tensor, layout.mesh)
    if isinstance(tensor, ShardedTensor):
        return _sharded_operand(tensor, target or tensor.layout.whole(), layout)
    prove_equal(tensor, layout if target is None else target)
    return _entered(tensor, None if target is None else _index_in(target), layout)


def use_weight(tensor: Tensor, mesh: Mesh) -> None:
    """Records that a tensor is used as the weight of a layer, so that its gradient is a mean.

    A sharded tensor is data of its sample group, unless it was computed from a sharded weight, as
    by a step of fast weights.
    """
    if not isinstance(tensor, ShardedTensor):
        observer.use_as_parameter(tensor, mesh)
    elif tensor._origin.sizes.of_weight and not is_sharded_weight(tensor):
        observer.use_as_parameter(local_of(tensor), mesh)


def operand_for(x: Tensor, layout: Layout, out_shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Returns the part of a broadcasting call's operand that this rank's part of the result needs.

    Args:
        x: a sharded or plain operand, broadcastable to `out_shape`.
        layout: layout of the result.
        out_shape: global shape of the result.

    Raises:
        RuntimeError: the operand does not broadcast to `out_shape`.
    """
    return operand_in(x, layout_of_operand(x, layout, out_shape), layout)


def layout_of_operand(x: Tensor, layout: Layout, out_shape: torch.Size | tuple[int, ...]) -> Layout:
    """Returns the layout in which a broadcasting call needs an operand; see `operand_for`."""
    require_broadcastable(x, out_shape)
    missing = len(out_shape) - x.dim()
    splits = [
        layout.splits[missing + d] if n == out_shape[missing + d] else None
        for d, n in enumerate(x.shape)
    ]
    return Layout(layout.mesh, tuple(x.shape), splits)


def require_broadcastable(x: Tensor, out_shape: torch.Size | tuple[int, ...]) -> None:
    """Raises unless an operand broadcasts to the shape of a result, as blocks of both might.

    Raises:
        RuntimeError: the operand has more dims, or an extent that is neither 1 nor the result's.
    """
    missing = len(out_shape) - x.dim()
    pairs = zip(x.shape, out_shape[max(0, missing) :], strict=False)
    if missing < 0 or any(n not in (1, m) for n, m in pairs):
        raise RuntimeError(
            f"an operand of shape {list(x.shape)} doesn't broadcast to the shape {list(out_shape)}"
        )


def operand_in(x: Tensor, target: Layout, layout: Layout) -> Tensor:
    """Returns the part of an operand that this rank's part of a result needs.

    Args:
        x: a sharded or plain operand.
        target: the layout in which `x` is needed; of its shape, on axes that `layout` uses.
        layout: layout of the result; only its axes matter.
    """
    if isinstance(x, ShardedTensor):
        return _sharded_operand(x, target, layout)
    prove_equal(x, target)
    return _entered(x, _index_in(target), layout)


def whole_operand(value: Any, like: ShardedTensor) -> Any:
    """Returns the full tensor of an argument, for a call that each rank computes as a whole.

    Args:
        value: a sharded tensor, a plain one that is equal on all ranks, or any other argument.
        like: a sharded argument of the call.
    """
    if isinstance(value, ShardedTensor):
        return value.full_tensor()
    if isinstance(value, Tensor):
        prove_equal(value, like.layout.whole())
    return value


def _index_in(target: Layout) -> tuple[slice, ...] | None:
    """Returns the index of this rank's part of a plain tensor; `None` for all of it."""
    if not target.split_dims:
        return None
    return target.box.slices


def _sharded_operand(x: ShardedTensor, target: Layout, layout: Layout) -> Tensor:
    """Returns the shard of `x` in `target`, for a result in `layout`, which uses more axes."""
    if is_sharded_weight(x):
        return _slice_operand(x, target, layout)
    local, mesh = local_of(redistribute(x, target)), layout.mesh
    more: tuple[str, ...] = ()
    if local is x._local and not x._is_gathered:
        more = tuple(a for a in layout.used_axes if a not in target.used_axes)
    factor = target.replicas / layout.replicas

    def made(local: Tensor) -> Tensor:
        return scale_grad(average_grad(local, mesh, more), factor)

    return _part(local, None, made, mesh) if factor != 1 else made(local)


def _slice_operand(x: ShardedTensor, target: Layout, layout: Layout) -> Tensor:
    """Returns the part of a sharded weight that this rank needs; see `pydist.slices`.

    The reducer averages the gradient of a slice over the ranks that hold it, so no other mean of
    it is formed here.
    """
    mesh, own = layout.mesh, local_of(x)
    observer.follow(own, mesh)
    factor = target.replicas / layout.replicas
    if x.layout.boxes == target.boxes:
        return _part(own, None, lambda own: scale_grad(own, factor), mesh) if factor != 1 else own
    return scale_grad(redistributed(own, x.layout, target, is_averaged=True), factor)


def _entered(x: Tensor, index: tuple[slice, ...] | None, layout: Layout) -> Tensor:
    """Returns a plain operand of a result in `layout`, or a part; parameters are reduced later."""
    mesh = layout.mesh
    factor = mesh.sample_size / layout.replicas

    def made(x: Tensor) -> Tensor:
        observer.follow(x, mesh)
        is_parameter = isinstance(x, nn.Parameter) and x.is_leaf
        part = x if is_parameter else average_grad(x, mesh, layout.used_axes)
        return scale_grad(part if index is None else part[index], factor)

    return _part(x, index, made, mesh) if factor != 1 else made(x)


def _part(
    x: Tensor, index: tuple[slice, ...] | None, made: Callable[[Tensor], Tensor], mesh: Mesh
) -> Tensor:
    """Returns an operand in the graph; a leaf's part follows the leaf until backward.

    Args:
        x: a plain tensor or a shard.
        index: the part of `x`; `None` for all of it.
        made: makes the part.
        mesh: the mesh.
    """
    part = made(x)
    if not (torch.is_grad_enabled() and x.is_leaf and (x.is_floating_point() or x.is_complex())):
        return part
    if x.is_inference():
        return part
    if not part.requires_grad:
        part = part.detach()  # may require a gradient by the time of a backward pass
    observer.note_part(part, x, index, made, mesh)
    return part


def refuse_shard_shaped(x: Tensor, layout: Layout) -> None:
    """Raises for the likeliest mistake when a plain operand does not fit the global shape."""
    pairs = zip(x.shape, layout.shape, strict=False)
    if tuple(x.shape) == layout.local_shape and any(n not in (1, m) for n, m in pairs):
        raise UsageError(
            f"a plain tensor of shape {tuple(x.shape)} meets a sharded one of global shape "
            f"{layout.shape}: it has the shape of this rank's shard; wrap it with "
            "ShardedTensor.from_local(tensor, x.layout)"
        )


def prove_equal(tensor: Tensor, layout: Layout, use: str = "operand") -> None:
    """Compares checksums of a plain tensor over the sample group, immediately or batched.

    Args:
        tensor: the plain tensor.
        layout: the block that each rank needs, and the mesh.
        use: the purpose. The first tensor of a shape, dtype and use in a module is compared before
            it is used, later ones together with those that follow.

    Raises:
        UsageError: the tensor, or an earlier one, differs between the ranks of the group.
        NotSupported: the tensor was cut and changed in place, and is needed in another layout.
    """
    mesh = layout.mesh
    if mesh.sample_size == 1 or is_partly_changed(tensor, layout):
        return
    if torch._C._current_graph_task_id() != -1:
        return  # recomputed in backward, perhaps on some ranks only; forward has compared it
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # on all ranks; the values do not exist yet
    consistency_of(mesh).prove_equal(tensor, mesh, use)
