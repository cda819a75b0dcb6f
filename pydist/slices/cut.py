"""The weights that are stored in slices, and their replacement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pydist.errors import NotSupported
from pydist.gradients.step_check import before_steps
from pydist.grid import CHANNEL_AXIS
from pydist.group_sizes import GroupSizes
from pydist.layout import Layout, Split
from pydist.mesh import Mesh
from pydist.ops.channels import channel_split
from pydist.slices import state, steps, vectors
from pydist.slices.state import own_part
from pydist.tensor import Origin, ShardedTensor

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def shard_weights(model: nn.Module, mesh: Mesh, statistics: str) -> None:
    """Replaces the weights of wide layers by this rank's slices of their output channels.

    These are the weights of `nn.Linear` and convolutions, transposed or not, with at least one
    output channel (or group) for each rank along the channel axis. Others stay whole: biases and
    norms, which are small; weights that another module has too, unless it has the same slices; and
    weights that are computed (weight norm, spectral norm, parametrizations).

    Collective: makes the groups that exchange slices.

    Args:
        model: the network, equal on all ranks.
        mesh: the mesh; nothing is done if its channel axis has one rank.
        statistics: see `Origin`.

    Raises:
        NotSupported: a weight has hooks, something else holds it, or its memory has another use.
    """
    if mesh.grid.size((CHANNEL_AXIS,)) == 1:
        return
    mesh.group((CHANNEL_AXIS,))
    chosen = _chosen(model, mesh)
    for name, weight, _ in chosen:  # before the first change
        _refuse_hooks(name, weight)
        _refuse_held(name, weight)
    _refuse_shared_memory(model, {name for name, _, _ in chosen})
    for _, weight, layout in chosen:
        _replace(weight, layout, statistics)
    for module in model.modules() if chosen else ():  # all: they may share the weights later
        state.install(module)
    before_steps(steps.show_slices)
    vectors.install()


def _chosen(model: nn.Module, mesh: Mesh) -> list[tuple[str, nn.Parameter, Layout]]:
    """Returns the weights that are cut, with their names and layouts."""
    wanted: dict[int, list[Layout | None]] = defaultdict(list)
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                layout = _layout_of(module, parameter, mesh) if name == "weight" else None
                wanted[id(parameter)].append(layout)
                named.setdefault(id(parameter), (f"{path}.{name}".lstrip("."), parameter))
    return [
        (*named[key], layout)
        for key, layouts in wanted.items()
        if (layout := layouts[0]) is not None and all(each == layout for each in layouts)
    ]


def _layout_of(module: nn.Module, weight: Tensor, mesh: Mesh) -> Layout | None:
    """Returns the layout of the slices of a layer's weight; `None` for one that stays whole."""
    kind = type(module)  # a subclass may use its weight in another way
    groups = 1
    if kind is nn.Linear:
        dim, channels = 0, weight.shape[0]
    elif isinstance(module, CONVOLUTIONS) and kind in CONVOLUTIONS:
        dim, channels, groups = 0, module.out_channels, module.groups
    elif isinstance(module, TRANSPOSED) and kind in TRANSPOSED:
        # [Ci, Co / groups, ...]: if there are groups, the rows of a group belong to its outputs.
        groups = module.groups
        dim, channels = (1, module.out_channels) if groups == 1 else (0, module.in_channels)
    else:
        return None
    split = channel_split(mesh, channels, groups)
    if split is None or not weight.is_floating_point() or weight.layout != torch.strided:
        return None
    splits: list[Split | None] = [None] * weight.dim()
    splits[dim] = split
    return Layout(mesh, tuple(weight.shape), splits)


def _refuse_hooks(name: str, weight: Any) -> None:
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise NotSupported(
            f"hooks on {name!r}, which becomes a sharded weight: register them after parallelize"
        )


def _refuse_held(name: str, weight: nn.Parameter) -> None:
    """Refuses a weight that torch can't swap, by a swap that is undone."""
    other = nn.Parameter(weight.detach().new_empty(0))
    try:
        torch.utils.swap_tensors(weight, other)
    except RuntimeError as error:
        raise NotSupported(
            f"{name!r} can't become a sharded weight, as something else holds it ({error}): "
            "parallelize the model before it is used"
        ) from error
    torch.utils.swap_tensors(weight, other)


def _refuse_shared_memory(model: nn.Module, names: Collection[str]) -> None:
    """Refuses weights that another parameter or buffer is tied to by its memory only.

    A slice has memory of its own, so the other one would keep the old values.
    """
    places = []
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if not x.numel() or x.is_meta or x.layout != torch.strided:
            continue
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        begin = x.data_ptr()
        places.append((begin, begin + (last + 1) * x.element_size(), last < x.numel(), name))
    begun, end, is_whole, before = 0, 0, False, ""
    for lo, hi, is_dense, name in sorted(places):
        # Two tensors with gaps, as halves of the columns of a matrix, may have separate elements.
        meets = lo < end and (is_whole or is_dense or lo == begun)
        if meets and (name in names or before in names):
            raise NotSupported(
                f"{before!r} and {name!r} share memory, but sharded weights have their own: use "
                "one parameter in both places, or parallelize(..., sharded_weights=False)"
            )
        if hi > end:
            begun, end, is_whole, before = lo, hi, is_dense, name


def _replace(weight: nn.Parameter, layout: Layout, statistics: str) -> None:
    """Makes the object `weight` the sharded weight, so that whatever holds it holds the slices."""
    mesh = layout.mesh
    own = nn.Parameter(own_part(weight.detach(), layout), weight.requires_grad)
    if weight.grad is not None:
        own.grad = own_part(weight.grad.detach(), layout)
    sizes = GroupSizes(mesh, 1, agreed=False)  # a weight is not a batch: all groups weigh the same
    sizes.of_weight = True
    sharded = ShardedTensor(own, layout, Origin(mesh.session.forwards, sizes, statistics))
    sharded.as_parameter()
    sharded.__dict__.update(weight.__dict__)  # attributes that a program has set
    torch.utils.swap_tensors(weight, sharded)
