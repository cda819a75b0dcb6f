"""Hooks before all steps of optimizers, and one that checks gradients and devices."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from pydist.errors import NotSupported
from pydist.exchange.own_slice import own_slice
from pydist.gradients.leaf import leaf_of
from pydist.gradients.newcomers import refuse_parting
from pydist.gradients.partitioned import PartitionedGradient

if TYPE_CHECKING:
    from pydist.mesh import Mesh

# The meshes of plain tensors that require a gradient and were used with sharded tensors. Not an
# attribute of the tensors, which then could not be pickled.
_meshes = WeakIdKeyDictionary()
_hooks: set[Callable[..., Any]] = set()
_lock = threading.Lock()


def note_plain(tensor: Tensor, mesh: Mesh) -> None:
    """Records a leaf that is not a parameter, which therefore is data of its sample group."""
    if mesh.data_size > 1:
        _meshes[tensor] = weakref.ref(mesh)


def before_steps(hook: Callable[..., Any]) -> None:
    """Calls a function before the steps of all optimizers from now on; registers it once.

    Args:
        hook: see `torch.optim.optimizer.register_optimizer_step_pre_hook`.
    """
    with _lock:
        if hook not in _hooks:
            register_optimizer_step_pre_hook(hook)
            _hooks.add(hook)


def check_step(optimizer: Optimizer, *_: object) -> None:
    """Refuses a step with a known gradient that was not reduced, or after which copies differ."""
    own: list[Tensor] = []
    steps_parts = getattr(optimizer, "steps_parts", False)
    for number, group in enumerate(optimizer.param_groups):
        for index, each in enumerate(group["params"]):
            parameter = own_slice(each)
            if hasattr(parameter, "to_local"):
                continue  # the gradient of a sharded tensor is reduced
            if parameter.grad is None or isinstance(parameter.grad, PartitionedGradient):
                continue
            leaf = leaf_of(parameter)
            if leaf is None:
                if parameter in _meshes and not isinstance(parameter, nn.Parameter):
                    own.append(parameter)
                continue
            leaf.place = leaf.place or (number, index)
            reducer = None if steps_parts else leaf.reducer()
            if reducer is not None and reducer.mesh.group(leaf.axes).mixes:
                raise NotSupported(
                    f"a step of {type(optimizer).__name__} on unequal devices, whose results "
                    "differ in their last bits: pydist.optim.sharded(optimizer, model) steps each "
                    "part of a parameter on one rank"
                )
            if leaf.paused and leaf.fired and leaf.reducer() is not None:
                if leaf.is_cleared(parameter):
                    continue
                raise NotSupported(
                    f"a step with the parameter {leaf.name}, whose gradient was accumulated under "
                    "no_sync() or by a backward() that raised, and is this rank's part: call "
                    "backward() outside of no_sync() before the step, or zero_grad()"
                )
    mesh = _meshes[own[0]]() if own else None
    if mesh is not None:
        refuse_parting(mesh.world, own)
