"""`parallelize`, which trains an unmodified network on a mesh."""

from __future__ import annotations

import sys
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from pydist.batch_layers import BatchLayers
from pydist.comm.consensus import require_same
from pydist.entry_hook import ENTRY, EntryHook
from pydist.errors import NotSupported, UsageError
from pydist.exchange.own_slice import is_sharded_weight
from pydist.gradients.closures import agree_on_closures_of
from pydist.gradients.forms.settings import Gradients, check_groups, settings_of
from pydist.mesh import Mesh
from pydist.ops.norm.batch_norm import STATISTICS
from pydist.structure import facts_of
from pydist.tensor import ShardedTensor
from pydist.watchdog import MODULE_PATH

_M = TypeVar("_M", bound=nn.Module)

GROUP_WEIGHTS = ("samples", "equal")


def parallelize(
    model: _M,
    mesh: Mesh,
    batch_norm: str = "global",
    group_weight: str = "samples",
    sharded_weights: bool = False,
    gradients: str | Gradients = "dense",
) -> _M:
    """Prepares `model` for training on a mesh: on split samples, over several groups, or both.

    The model keeps its class, its hooks and its `state_dict` keys; only hooks are added. All ranks
    start from the parameters and buffers of rank 0. Inputs may be sharded (from a `Loader`) or
    plain 5-D tensors or arrays, equal on all ranks of a sample group, which are cut on entry; if no
    argument is such, those in lists, tuples, dicts and dataclasses are cut. Of networks whose
    convolutions have fewer dims, images [N, C, H, W] or lines [N, C, W] are cut instead, if the
    mesh has several parts along height or width. With several groups,
    parts of the model that are called separately accept the same inputs.

    After `backward()`, every gradient is the mean over the sample groups, weighted by their numbers
    of samples: if the loss is a mean over samples, the gradient of the global batch. For other
    losses see `pydist.sum_over_groups`. This holds for the model's parameters and any other
    `nn.Parameter` that feeds or follows a sharded call, or is trained on the outputs of a frozen
    model; not for one that only follows `detach()` or `no_grad()`. It also holds for plain tensors
    that replace parameters, as in `torch.func.functional_call`; any other plain tensor is data of
    its group, with the gradient of the group's own loss. Hooks on parameters see the mean.

    The optimizer may be made before or after; `pydist.optim.sharded` partitions its step over the
    ranks. `model.no_sync()` defers the reduction, and hooks, to accumulate gradients.

    Args:
        model: any `nn.Module`; its calls on sharded tensors must have handlers.
        mesh: the mesh, from `pydist.init`.
        batch_norm: the ranks over which batch norm forms its statistics in training: "global" (all;
            as one device with the global batch), "group" (the sample group) or "rank". Running
            statistics are the mean over the ranks in each case.
        group_weight: the weight of a sample group's loss: "samples" (its number of samples in dim 0
            of the model's first sharded, 5-D or other tensor argument; an extent of 1 counts only
            if all have it), or "equal" (all groups the same, as under DDP).
        sharded_weights: whether ranks along the channel axis store slices of the weights of wide
            layers, with gradients and optimizer state, instead of whole weights. A sharded weight
            shows its global shape, and `state_dict()` is that of the whole network, but collective;
            see `pydist.slices`.
        gradients: how the ranks average gradients: "dense", "fp16", "bf16", "torus",
            "hierarchical", "powersgd", "dgc", "post_local", or settings such as
            `pydist.gradients.PowerSGD(rank=4)`. Compressed forms compress what is sent between
            sample groups only. Gradients that `torch.autograd.grad` returns, those with a graph,
            and those of parameters that belong to no model or are frozen at first are dense.

    Returns:
        The same object.

    Raises:
        UsageError: an argument is none of these, the model or a part of it is already parallelized,
            ranks have different models or (as threads) the same object, or can't send a parameter
            or buffer to each other.
        NotSupported: a part of the model is compiled, or reduces gradients itself; or weights are
            sharded, and the form of gradients keeps state.
    """
    _check(model, mesh, batch_norm, group_weight)
    form = settings_of(gradients)
    check_groups(form, mesh.data_size)
    if form.keeps and sharded_weights:
        raise NotSupported(
            f'gradients="{form.name}" with sharded_weights: its state would be that of slices; '
            'possible are "dense", "fp16", "bf16", "torus" and "hierarchical"'
        )
    given = {
        "batch_norm": batch_norm,
        "group_weight": group_weight,
        "sharded_weights": str(sharded_weights),
        "gradients": str(form),
    }
    entry = EntryHook(mesh, batch_norm, group_weight)
    if model.__dict__.setdefault(ENTRY, entry) is not entry:  # one step, for all threads
        raise UsageError(
            f"another rank, a thread of this process, parallelizes this {type(model).__name__}; "
            "each rank needs a model of its own: make it in the function that the ranks run"
        )
    try:
        require_same(mesh.world, {**given, **facts_of(model, devices=not mesh.world.mixes)})
        for path, module in model.named_modules():
            module.__dict__[MODULE_PATH] = path or type(model).__name__
        entry.adopt(model, sharded_weights=sharded_weights, gradients=form)
    except BaseException:
        # A refused model can be changed and given again.
        for module in model.modules():
            module.__dict__.pop(MODULE_PATH, None)
        del model.__dict__[ENTRY]
        raise
    model.register_forward_pre_hook(entry, with_kwargs=True)
    if mesh.data_size > 1:
        # First, so that other hooks get its result; also called when the forward pass raises.
        model.register_forward_hook(entry.batches.leave, prepend=True, always_call=True)
        agree_on_closures_of(model, mesh)
        parametrizations = {
            id(part)
            for module in model.modules()
            if isinstance(module, ParametrizationList)
            for part in module.modules()  # called when a parameter is read, without a batch
        }
        for layer in model.modules():
            if layer is not model and id(layer) not in parametrizations:
                layer.register_forward_pre_hook(entry.enter_part, with_kwargs=True)
                layer.register_forward_hook(entry.batches.leave, prepend=True, always_call=True)
    spans_ranks = mesh.size > 1 and batch_norm != "rank"
    BatchLayers(entry.of_batch, batch_norm=spans_ranks).adopt(model)
    model.__dict__["no_sync"] = entry.no_sync
    model.__dict__["__prepare_scriptable__"] = entry.refuse_script
    return model


def _check(model: nn.Module, mesh: Mesh, batch_norm: str, group_weight: str) -> None:
    """Checks the arguments of `parallelize`, before ranks compare anything."""
    if not isinstance(model, nn.Module) or not isinstance(mesh, Mesh):
        raise UsageError(
            f"parallelize({type(model).__name__}, {type(mesh).__name__}); possible are a "
            "torch.nn.Module and a mesh, from pydist.init()"
        )
    if batch_norm not in STATISTICS:
        raise UsageError(f"batch_norm={batch_norm!r}; possible are {', '.join(STATISTICS)}")
    if group_weight not in GROUP_WEIGHTS:
        raise UsageError(f"group_weight={group_weight!r}; possible are {', '.join(GROUP_WEIGHTS)}")
    for path, module in model.named_modules():
        if MODULE_PATH in module.__dict__:
            part = f"its part {path!r}" if path else f"this {type(model).__name__}"
            raise UsageError(f"{part} is parallelized already; parallelize the whole, once")
    refuse_kinds(model)
    if mesh.size > 1:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (why := obstacle(tensor)) is not None:
                raise UsageError(f"{name!r} of this {type(model).__name__} {why}")


def refuse_kinds(model: nn.Module) -> None:
    """Refuses a model whose parts have a type or state that prevents splitting them.

    Raises:
        NotSupported: a part is compiled, or reduces gradients itself.
    """
    for path, module in model.named_modules():
        if (why := _obstacle_of_kind(module)) is not None:
            what = f"the part {path!r} of the model" if path else "the model"
            raise NotSupported(f"{what} {why}")


def _obstacle_of_kind(module: nn.Module) -> str | None:
    """Returns why the type or state of a part of a model prevents splitting it, or `None`."""
    compiler = sys.modules.get("torch._dynamo")  # nothing is compiled before its import, a slow one
    # Another thread may be importing it.
    compiled = getattr(compiler, "OptimizedModule", None)
    wrapped = compiled is not None and isinstance(module, compiled)
    if wrapped or module._compiled_call_impl is not None:
        return "is compiled: the compiler can't trace exchanges between ranks; leave it as it is"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a torch.jit script, whose calls can't be split; give the module it was made from"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "is in DistributedDataParallel, which reduces gradients too; give its .module"
    return None


def obstacle(tensor: Tensor) -> str | None:
    """Returns why ranks can't send a parameter or buffer to each other, or `None`."""
    if is_lazy(tensor):
        return "has no shape yet: call the network once on a plain tensor before it is parallelized"
    if tensor.is_meta:
        return "has no values (device meta): give it some on rank 0, and memory on all ranks"
    if is_sharded_weight(tensor):
        return "is a sharded weight of another model: parallelize a model without its slices"
    if isinstance(tensor, ShardedTensor):
        return "is a sharded tensor: put its full_tensor() in its place"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; dense is possible"
    return None
